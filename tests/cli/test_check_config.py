"""`lazyshard check-config`: what it prints, and its exit codes."""

import json
from pathlib import Path

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


def test_file_in_order(tmp_path: Path) -> None:
    file = write(
        tmp_path, "version: 1\ndatasets:\n  - path: a\n    steps: [{filter_fn: 'os.path:isdir'}]\n  - path: b\n"
    )
    done = lazyshard("check-config", file)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{file}: in order: 2 data sets, 1 step\n", "")


def test_mistakes_are_told_in_a_line_each(tmp_path: Path) -> None:
    file = write(tmp_path, BAD)
    done = lazyshard("check-config", file)
    assert (done.returncode, done.stderr) == (3, "")
    first, second, last = done.stdout.splitlines()
    assert first.startswith(f"{file}:4: datasets[0].wieght: ")
    assert second.startswith(f"{file}:6: dataloader.batch_size: ")
    assert last == f"{file}: 2 mistakes"
    done = lazyshard("check-config", file, "--json")
    found = json.loads(done.stdout)
    assert (done.returncode, found["file"], found["ok"]) == (3, str(file), False)
    text = first.partition("wieght: ")[2]
    assert found["mistakes"][0] == {"path": "datasets[0].wieght", "line": 4, "text": text}


def test_nothing_is_imported_where_that_is_not_wanted(tmp_path: Path) -> None:
    file = write(tmp_path, "version: 1\ndatasets:\n  - path: a\n    steps: [{filter_fn: 'no_such_module:keep'}]\n")
    assert lazyshard("check-config", file, "--no-imports").returncode == 0
    done = lazyshard("check-config", file)
    assert (done.returncode, "no_such_module" in done.stdout) == (3, True)


def test_command_needs_no_torch(tmp_path: Path) -> None:
    file = write(tmp_path, BAD)
    program = (
        "import sys; from lazyshard.cli.command import execute; "
        f"code = execute(['check-config', {str(file)!r}]); print('torch' in sys.modules, code)"
    )
    assert python("-c", program).stdout.splitlines()[-1] == "False 3"
