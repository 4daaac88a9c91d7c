"""The demo's options, and the folder that it clears: never one that it did not make."""

from pathlib import Path

import pytest

from scripts.demonstration.demo_processes import exit_text, first_failed_rank
from scripts.demonstration.demo_settings import FolderRefused, parse, take_folder


def test_options_have_defaults_that_make_a_short_run() -> None:
    settings = parse([])
    assert settings.samples > 10_000
    assert 45 <= settings.samples / settings.rate <= 75
    assert settings.step_samples == 16


@pytest.mark.parametrize(
    "arguments",
    [["--rate", "0"], ["--rate", "nan"], ["--ranks", "-1"], ["--samples", "1e4"], ["--samples", "319"], ["--chunks"]],
)
def test_wrong_options_end_with_code_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as raised:
        parse(arguments)
    assert raised.value.code == 2
    assert arguments[0] in capsys.readouterr().err


def test_a_folder_of_the_demo_is_cleared(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "demo"
    with take_folder(folder):
        (folder / "stream").mkdir()
        (folder / "stream" / "chunk_00000.jsonl").touch()
        (folder / "elsewhere").symlink_to(tmp_path)
        marker = {path.name for path in folder.iterdir()} - {"stream", "elsewhere"}
    with take_folder(folder):
        assert {path.name for path in folder.iterdir()} == marker
    assert tmp_path.is_dir()


def test_a_folder_of_somebody_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").touch()
    with pytest.raises(FolderRefused, match="was not made by the demo"):
        take_folder(tmp_path)
    assert (tmp_path / "thesis.txt").exists()


def test_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(FolderRefused):
            take_folder(path)


def test_a_folder_in_use_is_refused(tmp_path: Path) -> None:
    with take_folder(tmp_path / "demo"), pytest.raises(FolderRefused, match="another demo is at work"):
        take_folder(tmp_path / "demo")


def test_the_end_of_a_process_is_told_in_words() -> None:
    assert exit_text(3) == "ended with exit code 3"
    assert exit_text(-9) == "was killed by SIGKILL"
    assert exit_text(-99) == "was killed by signal 99"
    assert first_failed_rank("E0101 failed (exitcode: -9) local_rank: 1 (pid: 7) of binary: python") == (1, -9)
    assert first_failed_rank("") is None
