"""`init` and docs/producer.md: examples that are right, and name what there is."""

import os
import re
from pathlib import Path

import pytest

from lazyshard_producer.cli import main
from lazyshard_producer.configuration.given import TABLES, Given, assemble, example, read_config
from lazyshard_producer.configuration.settings import OPTIONS, SOURCE_OPTIONS, Settings
from lazyshard_producer.display import Metrics
from lazyshard_producer.errors import SettingsInvalid
from tests.harness.processes.environment import ROOT
from tests.harness.processes.producing import assert_one_line, plain_sources, rows
from tests.producer.display.test_metrics import scrape

ALL = (*SOURCE_OPTIONS, *OPTIONS)
DOCS = (ROOT / "docs" / "producer.md").read_text("utf-8")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_what_is_written_is_accepted_by_check_and_sets_what_is_needed(capsys: pytest.CaptureFixture[str]) -> None:
    Path("data.jsonl").write_bytes(rows(0, 3))
    assert main(["init"]) == 0
    assert "check lazyshard-producer.toml" in capsys.readouterr().out
    assert main(["check", "lazyshard-producer.toml", "--out", "out"]) == 0
    assert '"id":2' in capsys.readouterr().out
    expected = Settings(sources=plain_sources(["data.jsonl"]), out="/shared/stream", samples_per_chunk=1000)
    assert assemble(Given(), read_config("lazyshard-producer.toml")) == expected


def test_every_setting_is_in_it_once() -> None:
    found = re.findall(r"^(?:# )?(\w+) = ", example(), re.MULTILINE)
    assert sorted(found) == sorted(["path", "follow", *(option.name for option in ALL)])


@pytest.mark.parametrize("name", [one.name for one in ALL if one.name not in ("out", "samples_per_chunk")])
def test_every_example_of_a_setting_can_be_read_where_it_stands(name: str) -> None:
    text = example().replace(f"\n# {name} = ", f"\n{name} = ")
    assert text != example()
    Path("x.toml").write_text(text)
    file = read_config("x.toml")
    assert file.problems == ()
    try:
        assemble(Given(), file)
    except SettingsInvalid as error:
        # Some of them need another one; what they are is right.
        assert not any("expected" in problem.text and ": should be " in problem.text for problem in error.problems)


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
    assert_one_line(capsys.readouterr().err, "x.toml: ")
    assert kind != "file" or path.read_bytes() == b"precious"
    assert os.listdir() == ["x.toml"]


def test_a_folder_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["init", "nowhere/x.toml"]) == 7
    assert_one_line(capsys.readouterr().err, "nowhere/x.toml: No such file or directory")


@pytest.mark.parametrize("flag", ["--source", "--follow", *(option.flag for option in ALL)])
def test_the_page_names_every_option(flag: str) -> None:
    assert re.search(rf"`{flag}[ `]|{flag} ", DOCS)


def test_the_page_shows_a_configuration_file_with_known_keys_only() -> None:
    (block,) = re.findall(r"^```toml\n(.*?)^```$", DOCS, re.MULTILINE | re.DOTALL)
    Path("run.toml").write_text(block)
    file = read_config("run.toml")
    assert (file.problems, len(file.sources)) == ((), 2)
    for table in TABLES:
        (comment,) = re.findall(rf"^\[{table}\] +# (.*)$", block, re.MULTILINE)
        assert sorted(comment.split(", ")) == sorted(option.name for option in OPTIONS if option.table == table)


def test_the_page_names_the_metrics_that_are_served() -> None:
    metrics = Metrics("127.0.0.1", 0)
    try:
        metrics.taken("a", 1)
        metrics.consumers({"train": 1}, 1)
        served = {re.sub(r"(_bucket|_sum|_count)?(\{.*)?$", "", name) for name in scrape(metrics)}
    finally:
        metrics.close()
    rows = re.findall(r"^\| (`.*?) \|", DOCS[DOCS.index("| metric, without") :], re.MULTILINE)
    assert {re.sub(r"\{.*", "", name) for row in rows for name in re.findall(r"`(.*?)`", row)} == served
