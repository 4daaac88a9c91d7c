"""Names that files hold: none becomes a path without a look at it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Final

import orjson
import pytest
import xxhash

from lazyshard.errors import LazyShardError, StateInvalid
from lazyshard.format.cursor import Cursor, CursorToken, ReadingMark, check_consumer, cursor_name
from lazyshard.format.names import chunk_name, parse_chunk_name
from lazyshard.inspection.tracing_states import read_state
from lazyshard.stream import CursorOwner, read_cursor, read_reading
from lazyshard.stream.consumers import forget_consumer, list_consumers
from lazyshard.stream.cursor import lock_name
from lazyshard_producer.errors import SourceRefused
from lazyshard_producer.following.journal import FollowState, decode_name
from lazyshard_producer.following.ledger import resume
from lazyshard_swift.errors import PositionInvalid
from lazyshard_swift.position import parse
from tests.security.hostile import NAMES, SECRET, command, edit, outside, producer, unchanged, write_stream

LEADING_ELSEWHERE: Final = ("", ".", "..", "../x", "/etc/passwd", "a/b", "a\0b")


@pytest.mark.parametrize("name", [*NAMES, ".sft", "sft.reading"], ids=ascii)
def test_no_consumer_has_a_name_that_is_a_path(name: str, tmp_path: Path) -> None:
    uses: tuple[Callable[[], object], ...] = (
        *(partial(use, name) for use in (check_consumer, cursor_name, lock_name)),
        *(partial(use, tmp_path, name) for use in (forget_consumer, read_cursor, read_reading, CursorOwner)),
        lambda: Cursor(name, None, 0, 0, {}, 1.0),
        lambda: ReadingMark(name, None, 1, 0, 0, 1.0),
    )
    for use in uses:
        with pytest.raises(ValueError, match="the name of a consumer is"):
            use()
    assert list(tmp_path.iterdir()) == []


def test_cursor_that_says_another_name_than_its_file_counts_for_nobody(tmp_path: Path) -> None:
    elsewhere = outside(tmp_path / "elsewhere")
    stream = write_stream(tmp_path / "stream", rows=6)
    (stream / "cursors").mkdir()
    values: dict[str, Any]
    for name in ("../../elsewhere/secret", "other", "", "a\0"):
        values = {"format": 1, "consumer": name, "stream_id": None, "consumed": 6, "chunks_before": 3, "plan": {}}
        (stream / "cursors" / "sft.json").write_bytes(orjson.dumps(values | {"updated_at": 1.0}))
        (found,) = list_consumers(stream, 3)
        assert (found.name, found.chunks_before) == ("sft", 0)
        assert found.problem is not None
        command("forget", stream, name, "--yes")
    assert unchanged(elsewhere)
    assert len(list(stream.glob("chunk_*"))) == 6


@pytest.mark.parametrize(
    "name",
    [
        "chunk_../../x.jsonl",
        "chunk_0.jsonl/../../x",
        "chunk_-1.jsonl",
        "chunk_1e9.jsonl",
        "chunk_٣.jsonl",
        "chunk_0.jsonl\n",
        "chunk_0.jsonl\0",
        f"chunk_{'9' * 256}.jsonl",
        "chunk_0x1.jsonl",
        "chunk_1_0.jsonl",
    ],
    ids=ascii,
)
def test_name_that_is_almost_a_chunks_is_none(name: str) -> None:
    assert parse_chunk_name(name) is None


def test_number_of_a_chunk_is_no_path() -> None:
    with pytest.raises(ValueError):
        chunk_name(-1)
    assert "/" not in chunk_name(10**300)


@pytest.mark.parametrize("name", LEADING_ELSEWHERE, ids=ascii)
def test_journal_names_files_of_its_directory_alone(name: str) -> None:
    coded = "\0" + os.fsencode(name).hex()
    for value in (name, coded, 5, None, ["a"], {"a": 1}):
        with pytest.raises(ValueError):
            decode_name(value)
        with pytest.raises(ValueError):
            FollowState().apply({"file": value, "offset": 5})
        with pytest.raises(ValueError):
            FollowState().apply({"file": value, "finished": 5})


@pytest.mark.parametrize("name", [*(name for name in NAMES if name), "a.jsonl", "journal", 5, None], ids=ascii)
def test_position_names_a_journal_of_ours_alone(name: Any, tmp_path: Path) -> None:
    elsewhere = outside(tmp_path / "elsewhere")
    position = {"kind": "follow", "path": "in", "journal": name, "bytes": 0, "digest": "", "read": 0, "blank": 0}
    with pytest.raises(SourceRefused, match="no position to go on from"):
        resume(position, tmp_path / ".producer.sources", "in")
    assert unchanged(elsewhere)


def test_producer_publishes_no_file_that_a_journal_names_elsewhere(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Who can write in the stream's directory must not have the producer read its own user's files."""
    elsewhere = outside(tmp_path / "elsewhere")
    incoming, stream = tmp_path / "incoming", tmp_path / "stream"
    incoming.mkdir()
    (incoming / "a.jsonl").write_bytes(b'{"id":0}\n{"id":1}\n')
    run = ("run", "--follow", incoming, "--out", stream, "--samples-per-chunk", 1, "--end-marker", "end")
    (incoming / "end").touch()
    assert producer(*run) == 0
    # As if the run had been stopped in the middle, with a journal that names a file elsewhere as begun.
    for file in ("stream.end", "head.json", "chunk_00001.jsonl", "chunk_00001.jsonl.completed"):
        (stream / file).unlink()
    line = b'{"file":"../elsewhere/secret","offset":0}\n'
    journals = stream / ".producer.sources"
    journals.mkdir(exist_ok=True)
    name = f"{xxhash.xxh3_64_hexdigest(str(incoming).encode())}-{'0' * 16}.jsonl"
    (journals / name).write_bytes(line)
    seal = stream / "chunk_00000.jsonl.completed"
    source = orjson.loads(seal.read_bytes())["source"]
    source["sources"][0] |= {"journal": name, "bytes": len(line), "digest": xxhash.xxh3_64_hexdigest(line)}
    edit(seal, source=source)
    assert producer(*run) in (4, 5)
    published = b"".join(path.read_bytes() for path in stream.glob("chunk_*.jsonl"))
    assert SECRET not in published
    assert "kept to myself" not in "".join(capfd.readouterr())
    assert unchanged(elsewhere)


@pytest.mark.parametrize("name", NAMES, ids=ascii)
def test_position_of_a_checkpoint_names_a_consumer_that_can_be(name: str) -> None:
    text = json.dumps({"format": 1, "stream": name, "directory": name, "consumer": name})
    for data in (text.encode(), name.encode("utf-8", "replace")):
        with pytest.raises(PositionInvalid):
            parse(data, "lazyshard.json")


@pytest.mark.parametrize(
    "text", ["null", "5", "[]", '"x"', "{}", '{"state": 5}', '{"state": {"parts": "x"}}', "{" * 200]
)
def test_state_that_is_none_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "lazyshard.json").write_text(text)
    with pytest.raises(StateInvalid):
        read_state(tmp_path)


def test_owner_of_a_cursor_is_no_more_than_a_text() -> None:
    for text in ("", "x", "9" * 5000, f"{'9' * 19}/{'a' * 16} process 1 on x", "1/../../x process 1 on x"):
        found = CursorToken.parse(text)
        assert found is None or found.turn < 2**62


def test_stream_may_have_no_impossible_directory(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for name in ("a\0b", "a" * 300, ""):
        for arguments in (("status", name), ("verify", name), ("inspect", name)):
            try:
                assert command(*arguments) == 2
            except ValueError:
                pytest.fail(f"{arguments}: a ValueError")
        assert "Traceback" not in capfd.readouterr().err
    with pytest.raises((LazyShardError, ValueError, OSError)):
        write_stream(tmp_path / ("a" * 300))
