import io
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final
from unittest import mock

import orjson
import pytest

from lazyshard import StreamReader
from lazyshard.errors import LazyShardError, ProducerFenced
from lazyshard.format.records import Head, Owner
from lazyshard.format.state import Cursor, CursorToken
from lazyshard.store.files import read_file
from lazyshard.stream.cursor import write_cursor
from lazyshard.stream.head import describe_producer, failure_words
from lazyshard.stream.listing import Published
from lazyshard.stream.lock import WriterLock
from tests.security.guards import ESCAPES, command, edit, producer, shown, write_stream
from tests.stream.streams import raised, refusal_of

COMMANDS: Final = (
    *(("status",), ("status", "--json"), ("inspect",), ("inspect", "--json"), ("inspect", "0", "--json")),
    *(("inspect", "0", "--rows", "3", "--full"), ("inspect", "--chunk", "0"), ("verify", "--jobs", "1")),
    *(("verify", "--json", "--jobs", "1"), ("trace", "--sample", "0", "--rows"), ("audit",), ("forget", "sft")),
    *(("audit", ESCAPES), ("trace", "--source", f"{ESCAPES}:0"), ("trace", "--consumer", ESCAPES)),
)


def hostile_stream(place: Path) -> Path:
    stream = write_stream(place / "stream", end=False, row={"id": ESCAPES, ESCAPES: [ESCAPES]})
    write_cursor(stream, Cursor("sft \u202e\u2028", None, 0, 0, {}, 1.0))
    edit(stream / "head.json", state="failed", note=ESCAPES, host=ESCAPES)
    edit(stream / "stream.owner", host=ESCAPES, token=ESCAPES)
    edit(stream / "chunk_00001.jsonl.completed", source={"sources": [{"path": ESCAPES, "kind": ESCAPES}], "x": ESCAPES})
    (stream / f"chunk_00007{ESCAPES}.jsonl").touch()
    (stream / "cursors" / f"{ESCAPES}.json").write_bytes(b"{}")
    (stream / "cursors" / "torn.json").write_bytes(ESCAPES.encode())
    (stream / "retired.json").symlink_to(f"/nowhere/{ESCAPES}")
    (stream / "quarantine.jsonl").write_bytes(
        orjson.dumps({"source": ESCAPES, "line": 1, "byte": 0, "reason": ESCAPES, "row": ESCAPES}) + b"\n"
    )
    return stream


@pytest.mark.parametrize("arguments", COMMANDS, ids=lambda arguments: repr(" ".join(arguments))[:40])
def test_no_cursor_moves(arguments: tuple[str, ...], tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    stream = hostile_stream(tmp_path)
    command(arguments[0], stream, *arguments[1:])
    out, err = capfd.readouterr()
    assert out + err
    assert shown(out + err) == ""


@pytest.mark.parametrize("terminal", [True, False])
def test_refused_rows(
    terminal: bool, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = hostile_stream(tmp_path)
    producer("quarantine", stream)
    assert shown("".join(capfd.readouterr())) == ""
    output = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    monkeypatch.setattr(output, "isatty", lambda: terminal, raising=False)
    monkeypatch.setattr(sys, "stdout", output)
    producer("quarantine", stream, "--rows")
    output.seek(0)
    printed = output.buffer.read()
    if terminal:
        assert printed.count(b"\n") == 1
        assert shown(printed.decode()) == ""
    else:
        assert printed == ESCAPES.rstrip("\r\n").encode() + b"\n"


def test_errors_of_the_library_hold_no_control_characters(tmp_path: Path) -> None:
    messages = [str(Owner(1, "t", ESCAPES, 1, 0.0)), failure_words(ESCAPES)]
    stream = hostile_stream(tmp_path)
    for state in ("failed", "waiting", "running", "idle"):
        edit(stream / "head.json", state=state)
        caught = raised(LazyShardError, lambda: StreamReader(stream, max_wait=0).read(100))
        messages.append(str(caught))
        head = Head(1, 1, False, state, 1.0, ESCAPES, 1, 0.0, ESCAPES)
        messages += [describe_producer(Published(1, 1, False, head), 5, 1.0, gone) for gone in (False, True)]
    refused = refusal_of(OSError, "out of the stream", read_file, stream / "retired.json")
    messages.append(str(refused))
    for message in messages:
        assert shown(message) == "", message
    assert "\x1b" not in CursorToken(1, "0" * 16, 1, ESCAPES).text


def test_the_holder_of_a_lock_is_named_as_text(tmp_path: Path) -> None:
    held = WriterLock(tmp_path, 0.0)
    edit(tmp_path / "stream.owner", host=ESCAPES)
    calls: list[Callable[[], object]] = [held.check, lambda: WriterLock(tmp_path, 0.0)]
    try:
        for call in calls:
            caught = raised(ProducerFenced, call)
            assert shown(str(caught)) == ""
    finally:
        held.release()


def test_an_unexpected_error_is_told_as_text(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with mock.patch("lazyshard.cli.status.take_survey", side_effect=RuntimeError(ESCAPES)):
        assert command("status", tmp_path) == 70
    err = capfd.readouterr().err
    assert "Traceback" in err
    assert shown(err) == ""
