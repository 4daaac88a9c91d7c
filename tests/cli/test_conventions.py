"""What all commands of both programs keep to, as `docs/commands.md` tells it: examples, codes, JSON, completion."""

import contextlib
import io
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final
from unittest import mock

import pytest
import typer.main

from lazyshard import ChunkWriter
from lazyshard.cli import exits
from lazyshard.cli.command import app
from lazyshard.cli.main import main
from lazyshard_producer import errors
from lazyshard_producer.cli import main as produced
from lazyshard_producer.command import app as producer_app
from lazyshard_producer.configuration.given import sort_arguments
from tests.cli.commands import as_another_user, lazyshard
from tests.harness.processes.environment import ROOT, environment
from tests.stream.streams import cursor, needs_root, produce

PAGE: Final = ROOT / "docs" / "commands.md"

WITHOUT_JSON: Final = {
    "lazyshard watch",
    *(f"lazyshard-producer {name}" for name in ("check", "end", "init", "run", "sequence")),
}
"""They write for people, or serve their facts as /status.json, or have those of `lazyshard status --json`."""

MORE: Final = {"audit": ["checkpoints"], "export": ["out"], "forget": ["sft"], "trace": ["--sample", "0"]}


COMMANDS: Final[dict[str, Any]] = {
    f"{name} {command}": found
    for name, one in (("lazyshard", app), ("lazyshard-producer", producer_app))
    for command, found in typer.main.get_command(one).commands.items()  # type: ignore[attr-defined]
}
OF_STREAMS: Final = ("audit", "export", "forget", "inspect", "status", "trace", "verify")


def examples(command: Any) -> Iterator[list[str]]:
    text, _, _ = command.epilog.replace("\n\n", "\n").partition("[bold]Exit codes")
    for line in text.splitlines():
        if line.startswith("lazyshard"):
            yield shlex.split(re.split(r" [|>] ", line)[0])


@pytest.mark.parametrize("name", COMMANDS)
def test_help_tells_working_examples_and_exit_codes(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for checkpoint in ("v1-20251121-101500/checkpoint-1200", "checkpoint-1200"):
        (tmp_path / "out" / checkpoint).mkdir(parents=True)
    command = COMMANDS[name]
    assert [one.name for one in command.params if not getattr(one, "help", None)] == []
    assert any("--json" in one.opts for one in command.params) is (name not in WITHOUT_JSON)
    found = list(examples(command))
    assert found and len(COMMANDS) >= 15
    for words in found:
        assert " ".join(words[:2]) == name
        # Parsing refuses options that are not there, and values that cannot be.
        arguments = sort_arguments(words[1:]).rest[1:] if words[0] == "lazyshard-producer" else words[2:]
        context = command.make_context(name, list(arguments))
        assert not [arg for arg in context.args if arg.startswith("-")]
    _, _, codes = command.epilog.partition("[bold]Exit codes[/bold]")
    found_codes = {int(code) for code in re.findall(r"^ *(?:Those of run: )?(\d+) ", codes, re.MULTILINE)}
    defined = {value for module in (exits, errors) for value in vars(module).values() if isinstance(value, int)}
    # A page is served until Ctrl-C.
    least = {2, 130} if name == "lazyshard watch" else {0} if name.endswith(" check") else {0, 2}
    assert defined | {0} >= found_codes >= least


def test_page_lists_every_command_once() -> None:
    rows = re.findall(r"^\| `(lazyshard[\w-]* [\w-]+)` \|", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(rows) == sorted(COMMANDS)


@pytest.mark.parametrize(("stream", "options"), [("missing", ["--json"]), ("", []), ("empty", ["--json"])])
@pytest.mark.parametrize("command", OF_STREAMS)
def test_a_stream_that_is_not_there_is_one_line_and_a_code(
    command: str, stream: str, options: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("checkpoints", "empty"):
        (tmp_path / name).mkdir()
    done = lazyshard(command, stream, *MORE.get(command, []), *options)
    # Without a cursor `trace` wants a checkpoint to be named.
    codes = (3, 5) if stream == "empty" and command != "trace" else (2, 5)
    assert (done.returncode in codes, done.stdout) == (True, ""), done
    lines = done.stderr.splitlines()
    assert lines[-1].startswith("lazyshard: error: ")
    assert stream == "empty" or (len(lines) == 1 and (stream or "STREAM") in lines[0])
    assert sorted(os.listdir(tmp_path)) == ["checkpoints", "empty"]
    assert os.listdir(tmp_path / "empty") == []


@needs_root
@pytest.mark.parametrize(
    ("closed", "arguments", "told"),
    [
        ("head.json", ["status", "."], "head.json"),
        ("chunk_00001.jsonl", ["verify", ".", "--jobs", "1"], "unchecked: chunk_00001.jsonl: "),
        ("cursors", ["forget", ".", "sft", "--yes"], "cursors"),
    ],
)
def test_permission_is_a_matter_of_the_filesystem(
    closed: str, arguments: list[str], told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cursor(produce(tmp_path, 6, 2, end=False), "sft", consumed=4, chunks_before=1)
    monkeypatch.chdir(tmp_path)
    lazyshard(*[word.replace("sft", "nobody") for word in arguments])
    (tmp_path / closed).chmod(0o555 if closed == "cursors" else 0)

    def look() -> None:
        done = lazyshard(*arguments)
        assert (done.returncode, told in done.stdout + done.stderr, "Traceback" in done.stderr) == (7, True, False)

    as_another_user(tmp_path, monkeypatch, look)
    assert os.listdir(tmp_path / "cursors") == ["sft.json"]


@pytest.mark.parametrize(
    ("program", "line", "offered"),
    [
        (main, "lazyshard ver", ["verify", "verify-filesystem"]),
        (produced, "lazyshard-producer run --max-a", ["--max-ahead"]),
    ],
)
def test_completion(program: Callable[[list[str]], int], line: str, offered: list[str]) -> None:
    words = line.split()
    asked = {f"_{words[0].replace('-', '_').upper()}_COMPLETE": "complete_bash", "COMP_WORDS": line}
    out = io.StringIO()
    with (
        mock.patch.dict(os.environ, asked | {"COMP_CWORD": str(len(words) - 1)}),
        contextlib.redirect_stdout(out),
        contextlib.suppress(SystemExit),
    ):
        assert program([]) == 0
    assert out.getvalue().split() == offered


def run(*arguments: object, **options: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "lazyshard.cli", *map(str, arguments)]
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "timeout": 60} | options
    return subprocess.run(command, stdin=subprocess.DEVNULL, check=False, **options)


def buffered() -> dict[str, str]:
    return {name: value for name, value in environment().items() if name != "PYTHONUNBUFFERED"}


@pytest.mark.parametrize(("told", "more"), [(["--watch", "--json"], {}), ([], {"PYTHONUNBUFFERED": "1"})])
def test_a_disk_that_takes_no_output_is_an_error(told: list[str], more: dict[str, str], tmp_path: Path) -> None:
    stream = produce(tmp_path / "s", 1)
    with open("/dev/full", "w") as full:
        done = run("status", stream, *told, env=buffered() | more, stdout=full)
    assert (done.returncode, done.stderr.count("\n")) == (7, 1)


@pytest.mark.parametrize(
    "words", [["inspect", "--chunk", "0", "--rows", "9999", "--full"], ["status", "--watch", "--json"]]
)
def test_a_reader_that_goes_away_is_no_error(words: list[str], tmp_path: Path) -> None:
    stream = tmp_path / "s"
    with ChunkWriter(stream, 3000) as writer:
        for row in range(3000):
            writer.write({"id": row, "text": "x" * 200})
    read, write = os.pipe()
    os.close(read)
    try:
        done = run(words[0], stream, *words[1:], env=buffered(), stdout=write)
    finally:
        os.close(write)
    assert (done.returncode, done.stderr) == (0, "")
