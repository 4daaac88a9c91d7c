"""Names of consumers, tokens of runs, and how a blend stands, as cursors keep them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lazyshard.errors import VersionUnsupported
from lazyshard.format.cursor import (
    MAX_SHARES,
    BlendShare,
    Cursor,
    CursorToken,
    ReadingMark,
    blend_shares,
    check_consumer,
    cursor_name,
    given_shares,
    reading_name,
)
from lazyshard.format.state import BlendPartState, BlendState, RunState
from lazyshard.part import Part
from tests.format.cases import changed
from tests.format.records import CURSOR, OWNER, RECORDS


def test_state_of_a_later_format_is_refused_by_the_file() -> None:
    with pytest.raises(VersionUnsupported) as caught:
        Cursor.decode(changed(RECORDS["cursor"].golden, state={"format": 2}), "sft")
    assert (caught.value.file, caught.value.field) == ("cursors/sft.json", "state.format")


def test_owner_is_a_token_or_a_strangers() -> None:
    token = CursorToken(3, "9c41d7e2b06f83a5", 14106, "node1")
    assert (token.text, str(token)) == (OWNER, "process 14106 on node1")
    assert CursorToken.parse(OWNER) == token
    assert CursorToken(1, "0" * 16, 1, "a\nb\ud800").text == f"1/{'0' * 16} process 1 on a?b?"
    longest = CursorToken(2**62, "0" * 16, 2**31, "h" * 300)
    assert CursorToken.parse(longest.text) == replace(longest, host="h" * 200)
    assert replace(CURSOR, owner=longest.text).owner == longest.text
    for stranger in ("", "me", "0" + OWNER, OWNER[1:], "0" + OWNER[1:], OWNER.upper(), f"{2**62 + 1}{OWNER[1:]}"):
        assert CursorToken.parse(stranger) is None


@pytest.mark.parametrize(
    ("names", "fact"),
    [
        (["", "a" * 201, "ü" * 101], "1 to 200 bytes"),
        (["a/b", "/", "a\0", "a\nb", "a\x7f", "a\ud800"], 'without "/"'),
        ([".", "..", ".sft"], "a dot"),
        (["sft.reading"], '".reading"'),
        ([5, None], "a string"),
    ],
)
def test_name_that_no_consumer_can_have_is_refused(names: list[Any], fact: str) -> None:
    for name in names:
        for use in (check_consumer, cursor_name, reading_name, lambda name: Cursor(name, None, 0, 0, {}, 0.0)):
            with pytest.raises(ValueError) as caught:
                use(name)
            assert fact in str(caught.value)
            assert len(str(caught.value)) < 200


@pytest.mark.parametrize("name", ["sft", "a" * 200, "ü" * 100, "run 7", "a.json", "reading", "x.reading.2", "-", "~"])
def test_any_other_name_is_a_file_name(name: str, tmp_path: Path) -> None:
    assert (cursor_name(name), reading_name(name)) == (f"{name}.json", f"{name}.reading.json")
    (tmp_path / f".{name}.0123456789abcdef").write_bytes(b"")
    (tmp_path / cursor_name(name)).write_bytes(b"")
    cursor, mark = Cursor(name, None, 0, 0, {}, 0.0), ReadingMark(name, None, 1, 0, 0, 0.0)
    assert Cursor.decode(cursor.encode(), name) == cursor
    assert ReadingMark.decode(mark.encode(), name) == mark


def run(consumed: int) -> RunState:
    return RunState(None, 10, 10, 0, 0, None, (Part(1, 1, consumed),), consumed)


def state(draws: int) -> BlendState:
    """Weights of 3 to 1, and after four draws of 1 to 1; a stream that is blended no more stands before them."""
    pieces = ((0, (3, 1), 0), (4, (1, 1), 0))
    part = BlendPartState(1, 1, draws, (1, 2), pieces, ((0, 0), (0, 0)))
    return BlendState(("old", "a", "b"), (run(7), run(3), run(draws - 3)), (part,), draws)


def test_shares_of_a_blend_are_those_of_what_comes_next() -> None:
    directories = {"a": "/data/a", "b": "/data/b"}
    assert blend_shares(state(3), directories) == (BlendShare("/data/a", 0.75, 3), BlendShare("/data/b", 0.25, 0))
    assert blend_shares(state(4), directories) == (BlendShare("/data/a", 0.5, 3), BlendShare("/data/b", 0.5, 1))
    # Names are kept as they can be shown.
    shown = blend_shares(state(4), {"a": "/x/" + "y" * 500, "b": "\udc80\n"})
    assert [one.stream for one in shown] == ["y" * 400, "\\udc80\\n"]


def test_of_too_many_streams_nothing_is_kept() -> None:
    for count in (MAX_SHARES, MAX_SHARES + 1):
        names = tuple(str(number) for number in range(count))
        part = BlendPartState(1, 1, 0, tuple(range(count)), ((0, (1,) * count, 0),), ((0, 0),) * count)
        shares = blend_shares(BlendState(names, (run(0),) * count, (part,), 0), dict(zip(names, names, strict=True)))
        assert len(shares) == (count if count == MAX_SHARES else 0)


def test_what_each_stream_of_a_blend_has_given() -> None:
    assert given_shares([BlendShare("a", 0.5, 3), BlendShare("b", 0.5, 1)]) == [0.75, 0.25]
    assert given_shares([BlendShare("a", 1.0, 0)]) == [None]
