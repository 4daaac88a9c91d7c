"""`init`: an example of a configuration file that is right, and never in the place of another file."""

import os
import re
from pathlib import Path

import pytest

from lazyshard_producer.cli import main
from lazyshard_producer.configuration.assembly import assemble
from lazyshard_producer.configuration.command_line import Flags
from lazyshard_producer.configuration.config import example, read_config
from lazyshard_producer.configuration.settings import BY_NAME, OPTIONS, SOURCE_OPTIONS, Settings
from lazyshard_producer.errors import SettingsInvalid
from tests.harness.processes.producing import assert_one_line, plain_sources, rows


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_what_is_written_is_accepted_by_check(capsys: pytest.CaptureFixture[str]) -> None:
    Path("data.jsonl").write_bytes(rows(0, 3))
    assert main(["init"]) == 0
    assert capsys.readouterr().out == (
        "written: lazyshard-producer.toml; edit it, then `lazyshard-producer check lazyshard-producer.toml` says what "
        "it means\n"
    )
    assert main(["check", "lazyshard-producer.toml", "--out", "out"]) == 0
    assert '"id":2' in capsys.readouterr().out


def test_the_example_as_it_is_sets_nothing_but_what_is_needed() -> None:
    assert main(["init", "x.toml"]) == 0
    expected = Settings(sources=plain_sources(["data.jsonl"]), out="/shared/stream", samples_per_chunk=1000)
    assert assemble(Flags(), read_config("x.toml")) == expected


def test_every_setting_is_in_it_once() -> None:
    found = re.findall(r"^(?:# )?(\w+) = ", example(), re.MULTILINE)
    assert sorted(found) == sorted(["path", "follow", *(option.name for option in (*SOURCE_OPTIONS, *OPTIONS))])


@pytest.mark.parametrize("name", [name for name in BY_NAME if name not in ("out", "samples_per_chunk")])
def test_every_example_of_a_setting_can_be_read_where_it_stands(name: str) -> None:
    text = example().replace(f"\n# {name} = ", f"\n{name} = ")
    assert text != example()
    Path("x.toml").write_text(text)
    file = read_config("x.toml")
    assert file.problems == ()
    try:
        assemble(Flags(), file)
    except SettingsInvalid as error:
        # Some of them need another one; what they are is right.
        assert not any("is needed, got" in problem.text for problem in error.problems)


def test_the_help_of_an_option_that_has_a_default_ends_in_it() -> None:
    for option in (*SOURCE_OPTIONS, *OPTIONS):
        assert "Default: " not in option.about.help or re.search(r"Default: [^ ].*\.$", option.about.help), option.name


@pytest.mark.parametrize("kind", ["file", "directory", "link to nothing"])
def test_what_is_there_is_left_as_it_is(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = Path("x.toml")
    if kind == "file":
        path.write_bytes(b"precious")
    elif kind == "directory":
        path.mkdir()
    else:
        path.symlink_to("nowhere")
    assert main(["init", "x.toml"]) == 2
    assert_one_line(capsys.readouterr().err, "x.toml: there is a file of this name already")
    assert kind != "file" or path.read_bytes() == b"precious"
    assert os.listdir() == ["x.toml"]


def test_a_folder_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["init", "nowhere/x.toml"]) == 7
    assert_one_line(capsys.readouterr().err, "nowhere/x.toml: No such file or directory")
