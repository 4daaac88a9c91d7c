"""What all commands of both programs keep to, as `docs/commands.md` tells it: examples, codes, JSON, completion."""

import contextlib
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import pytest
import typer.main
from typer.testing import CliRunner

from lazyshard import ChunkWriter
from lazyshard.cli.command import app
from lazyshard.cli.main import main
from lazyshard_producer.cli import main as produced
from lazyshard_producer.command import app as producer_app
from lazyshard_producer.configuration.command_line import sort_arguments
from tests.cli.commands import ROOT, environment, lazyshard
from tests.stream.consuming import cursor
from tests.stream.streams import produce

PAGE: Final = ROOT / "docs" / "commands.md"

WITHOUT_JSON: Final = {
    "lazyshard watch": "serves its facts as /status.json",
    "lazyshard-producer check": "writes for people",
    "lazyshard-producer init": "writes a file for people",
    "lazyshard-producer run": "its facts are those of `lazyshard status --json`",
}

AREAS: Final = {
    "lazyshard doctor": ["swift"],
    "lazyshard check-config": ["train.yaml"],
    "lazyshard verify-filesystem": ["."],
    "lazyshard simulate": ["--ranks", "1"],
}
"""Commands that are not about a stream, and what they are about."""

MORE: Final = {
    "audit": ["checkpoints"],
    "export": ["out"],
    "forget": ["sft"],
    "trace": ["--sample", "0"],
}
"""What a command needs beside a stream."""


def commands() -> dict[str, Any]:
    """All commands by how they are called."""
    return {
        f"{name} {command}": found
        for name, one in (("lazyshard", app), ("lazyshard-producer", producer_app))
        for command, found in typer.main.get_command(one).commands.items()  # type: ignore[attr-defined]
    }


COMMANDS: Final = commands()
OF_STREAMS: Final = [
    name.split()[1] for name in COMMANDS if name.startswith("lazyshard ") and name not in AREAS and name[10:] != "watch"
]


def examples(command: Any) -> Iterator[list[str]]:
    """What the help of a command gives as examples."""
    text, _, _ = command.epilog.replace("\n\n", "\n").partition("[bold]Exit codes")
    for line in text.splitlines():
        if line.startswith("lazyshard"):
            yield shlex.split(re.split(r" [|>] ", line)[0])


def test_all_commands_are_looked_at() -> None:
    assert len(COMMANDS) >= 15
    assert {"lazyshard watch", "lazyshard-producer run"} <= set(COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_help_tells_examples_that_the_command_takes_and_exit_codes(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "out").mkdir()  # checkpoints, in some of them
    command = COMMANDS[name]
    found = list(examples(command))
    assert found, "no example"
    for words in found:
        assert " ".join(words[:2]) == name
        # Parsing refuses options that are not there, and values that cannot be.
        arguments = sort_arguments(words[1:]).rest[1:] if words[0] == "lazyshard-producer" else words[2:]
        context = command.make_context(name, list(arguments))
        assert not [arg for arg in context.args if arg.startswith("-")]
    _, _, codes = command.epilog.partition("[bold]Exit codes[/bold]")
    found_codes = {int(code) for code in re.findall(r"^ *(?:Those of run: )?(\d+) ", codes, re.MULTILINE)}
    # A page is served until Ctrl-C.
    assert found_codes >= ({2, 130} if name == "lazyshard watch" else {0} if name.endswith(" check") else {0, 2})


@pytest.mark.parametrize(
    ("command", "codes"),
    [
        ("audit", {0, 1, 2, 3, 5, 7, 9}),
        ("check-config", {0, 1, 2, 3, 7}),
        ("doctor", {0, 1, 2}),
        ("export", {0, 1, 2, 3, 5, 6, 7}),
        ("forget", {0, 1, 2, 3, 5, 7}),
        ("inspect", {0, 1, 2, 3, 5, 7}),
        ("simulate", {0, 1, 2}),
        ("status", {0, 1, 2, 3, 5, 7}),
        ("trace", {0, 1, 2, 3, 5, 7}),
        ("verify", {0, 1, 2, 5, 7}),
        ("verify-filesystem", {0, 1, 2, 3, 4}),
    ],
)
def test_help_lists_the_exit_codes(command: str, codes: set[int]) -> None:
    shown = CliRunner().invoke(app, [command, "--help"]).output
    listed = {int(code) for code in re.findall(r"^ +(\d+)  \S", shown, re.MULTILINE)}
    assert listed == codes | {70, 71, 130}


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_is_explained(name: str) -> None:
    assert [one.name for one in COMMANDS[name].params if not getattr(one, "help", None)] == []


@pytest.mark.parametrize("name", [*COMMANDS, "lazyshard", "lazyshard-producer"])
def test_help_shows_no_type_of_what_takes_no_value(name: str) -> None:
    program, _, command = name.partition(" ")
    text = CliRunner().invoke(app if program == "lazyshard" else producer_app, [*command.split(), "--help"]).output
    assert "Show this" in text and not re.search("(?i)<bool>|boolean", text), text


@pytest.mark.parametrize("name", COMMANDS)
def test_facts_come_as_json_too(name: str) -> None:
    has = any("--json" in one.opts for one in COMMANDS[name].params)
    assert has is (name not in WITHOUT_JSON)


def test_page_lists_every_command_once() -> None:
    rows = re.findall(r"^\| `(lazyshard[\w-]* [\w-]+)` \|", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(rows) == sorted(COMMANDS)


@pytest.mark.parametrize(
    ("stream", "options"), [("missing", []), ("missing", ["--json"]), ("", [])], ids=["text", "json", "empty"]
)
@pytest.mark.parametrize("command", OF_STREAMS)
def test_a_stream_that_is_not_there_is_one_line_and_a_code(
    command: str,
    stream: str,
    options: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "checkpoints").mkdir()
    code = main([command, stream, *MORE.get(command, []), *options])
    shown = capsys.readouterr()
    assert (code in (2, 5), shown.out) == (True, ""), (code, shown)
    (line,) = shown.err.splitlines()
    assert line.startswith("lazyshard: error: ") and (stream or "STREAM") in line
    assert sorted(os.listdir(tmp_path)) == ["checkpoints"]


@pytest.mark.parametrize("command", OF_STREAMS)
def test_a_directory_that_holds_no_stream_is_one_line_and_a_code(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "checkpoints").mkdir()
    code = main([command, "empty", *MORE.get(command, []), "--json"])
    shown = capsys.readouterr()
    # Without a cursor `trace` wants a checkpoint to be named.
    assert (code in ((2,) if command == "trace" else (3, 5)), shown.out) == (True, ""), (code, shown)
    assert shown.err.splitlines()[-1].startswith("lazyshard: error: ")
    assert sorted(os.listdir(tmp_path / "empty")) == []


def test_json_of_forget(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    new = produce(tmp_path / "t", 5, 4)
    cursor(new, "sft", consumed=4, chunks_before=1)
    assert main(["forget", str(new), "sft", "--yes", "--json"]) == 0
    shown = capsys.readouterr()
    assert json.loads(shown.out) == {
        "stream": str(new),
        "consumer": "sft",
        "forgotten": True,
        "samples": 4,
        "chunks_before": 1,
    }
    assert "consumer sft of" in shown.err
    assert os.listdir(new / "cursors") == []


@pytest.mark.parametrize(
    ("program", "line", "offered"),
    [
        (main, "lazyshard ver", ["verify", "verify-filesystem"]),
        (main, "lazyshard verify --qu", ["--quick"]),
        (produced, "lazyshard-producer qu", ["quarantine"]),
        (produced, "lazyshard-producer run --max-a", ["--max-ahead"]),
    ],
)
def test_completion(
    program: Callable[[list[str]], int],
    line: str,
    offered: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """What bash would be given for a line that is begun."""
    words = line.split()
    monkeypatch.setenv(f"_{words[0].replace('-', '_').upper()}_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", line)
    monkeypatch.setenv("COMP_CWORD", str(len(words) - 1))
    with contextlib.suppress(SystemExit):
        assert program([]) == 0
    shown = capsys.readouterr()
    assert (shown.out.split(), shown.err) == (offered, "")


def test_completion_is_for_the_shells_that_the_page_names() -> None:
    for option in ("--install-completion", "--show-completion"):
        assert option in lazyshard("--help").stdout
    found = subprocess.run(
        [sys.executable, "-m", "lazyshard.cli", "--show-completion", "fish"],
        env=environment() | {"_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (found.returncode, found.stderr) == (0, "")
    assert "complete --command lazyshard" in found.stdout


def buffered() -> dict[str, str]:
    """Most people's environment, where output waits in a buffer that is flushed once more at the end."""
    return {name: value for name, value in environment().items() if name != "PYTHONUNBUFFERED"}


@pytest.mark.parametrize(("told", "more"), [(["--json"], {}), ([], {"PYTHONUNBUFFERED": "1"})])
def test_a_disk_that_takes_no_output_is_an_error(told: list[str], more: dict[str, str], tmp_path: Path) -> None:
    stream = produce(tmp_path / "s", 1)
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "lazyshard.cli", "status", str(stream), *told],
            env=buffered() | more,
            stdin=subprocess.DEVNULL,
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
            check=False,
        )
    assert (done.returncode, done.stderr.count("\n")) == (7, 1)
    assert done.stderr.startswith("lazyshard: error: No space left on device; mend that")


@pytest.mark.parametrize(
    "arguments", [["inspect", "--chunk", "0", "--rows", "100000", "--full"], ["inspect", "--json"]]
)
def test_a_reader_that_goes_away_is_no_error(arguments: list[str], tmp_path: Path) -> None:
    stream = tmp_path / "s"
    with ChunkWriter(stream, 3000) as writer:
        for row in range(3000):
            writer.write({"id": row, "text": "x" * 200})
    read, write = os.pipe()
    os.close(read)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "lazyshard.cli", arguments[0], str(stream), *arguments[1:]],
            env=buffered(),
            stdin=subprocess.DEVNULL,
            stdout=write,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
            check=False,
        )
    finally:
        os.close(write)
    assert (done.returncode, done.stderr) == (0, "")
