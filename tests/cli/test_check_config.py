"""`lazyshard check-config`: what it prints, and its exit codes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lazyshard.cli.main import main
from tests.cli.commands import lazyshard, python

BAD = """version: 1
datasets:
  - path: chat
    wieght: 1
dataloader:
  batch_size: 0
"""


def write(folder: Path, text: str) -> Path:
    file = folder / "train.yaml"
    file.write_text(text, encoding="utf-8")
    return file


def test_file_in_order(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write(
        tmp_path, "version: 1\ndatasets:\n  - path: a\n    steps: [{filter_fn: 'os.path:isdir'}]\n  - path: b\n"
    )
    assert main(["check-config", str(file)]) == 0
    assert capsys.readouterr() == (f"{file}: in order: 2 data sets, 1 step\n", "")


def test_mistakes_are_told_in_a_line_each(tmp_path: Path) -> None:
    file = write(tmp_path, BAD)
    done = lazyshard("check-config", file)
    assert (done.returncode, done.stderr) == (3, "")
    assert done.stdout.splitlines() == [
        f"{file}:4: datasets[0].wieght: unknown key; is weight meant?",
        f"{file}:6: dataloader.batch_size: expected greater than or equal to 1, found 0",
        f"{file}: 2 mistakes",
    ]


def test_json_has_them_as_values(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write(tmp_path, BAD)
    assert main(["check-config", str(file), "--json"]) == 3
    found = json.loads(capsys.readouterr().out)
    assert (found["file"], found["ok"], found["older"]) == (str(file), False, False)
    assert found["mistakes"][0] == {
        "path": "datasets[0].wieght",
        "line": 4,
        "text": "unknown key; is weight meant?",
    }


def test_older_form_is_in_order_and_told_of(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write(tmp_path, "dataset: {source: chat}\n")
    assert main(["check-config", str(file)]) == 0
    out, err = capsys.readouterr()
    assert out == f"{file}: in order: 1 data set, 0 steps\n"
    assert err.startswith(f"{file}: this is the flat form of version 0, which later releases will not read any more. ")


def test_nothing_is_imported_where_that_is_not_wanted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write(tmp_path, "version: 1\ndatasets:\n  - path: a\n    steps: [{filter_fn: 'no_such_module:keep'}]\n")
    assert main(["check-config", str(file), "--no-imports"]) == 0
    assert main(["check-config", str(file)]) == 3
    assert "importing no_such_module raised ModuleNotFoundError" in capsys.readouterr().out


@pytest.mark.parametrize(("name", "code"), [("missing.yaml", 7), (".", 2), ("", 2)])
def test_file_that_cannot_be_read(tmp_path: Path, name: str, code: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check-config", str(tmp_path / name) if name else ""]) == code
    assert capsys.readouterr().err.startswith("lazyshard: error: ")


def test_command_needs_no_torch(tmp_path: Path) -> None:
    file = write(tmp_path, BAD)
    program = (
        "import sys; from lazyshard.cli.command import execute; "
        f"code = execute(['check-config', {str(file)!r}]); print('torch' in sys.modules, code)"
    )
    assert python("-c", program).stdout.splitlines()[-1] == "False 3"
