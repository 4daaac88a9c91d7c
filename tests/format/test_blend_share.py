"""How a blend stands, as cursors tell it to people: by its state, and back from a file."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from lazyshard.errors import FileInvalid
from lazyshard.format.blend_state import MAX_SHARES, BlendPartState, BlendShare, BlendState, blend_shares, given_shares
from lazyshard.format.cursor import Cursor
from lazyshard.format.state import RunState
from lazyshard.part import Part
from tests.format.cases import changed

CURSOR = Cursor("sft", None, 4, 0, {}, 1.0)
SHARES = (BlendShare("/data/a", 0.75, 3), BlendShare("/data/b", 0.25, 1))
GOLDEN = (
    b'{"format":1,"consumer":"sft","stream_id":null,"consumed":4,"chunks_before":0,"plan":{},"updated_at":1.0,"blend":'
    b'[{"stream":"/data/a","weight":0.75,"consumed":3},{"stream":"/data/b","weight":0.25,"consumed":1}]}\n'
)


def run(consumed: int) -> RunState:
    return RunState(None, 10, 10, 0, 0, None, (Part(1, 1, consumed),), consumed)


def state(draws: int) -> BlendState:
    """Weights of 3 to 1, and after four draws of 1 to 1; a stream that is blended no more stands before them."""
    pieces = ((0, (3, 1), 0), (4, (1, 1), 0))
    part = BlendPartState(1, 1, draws, (1, 2), pieces, ((0, 0), (0, 0)))
    return BlendState(("old", "a", "b"), (run(7), run(3), run(draws - 3)), (part,), draws)


def test_bytes_of_a_cursor_with_a_blend_are_pinned() -> None:
    cursor = replace(CURSOR, blend=SHARES)
    assert cursor.encode() == GOLDEN
    assert Cursor.decode(GOLDEN, "sft") == cursor
    assert Cursor.decode(changed(GOLDEN, blend=None), "sft") == CURSOR


def test_weights_are_those_of_what_comes_next() -> None:
    directories = {"a": "/data/a", "b": "/data/b"}
    assert blend_shares(state(3), directories) == (BlendShare("/data/a", 0.75, 3), BlendShare("/data/b", 0.25, 0))
    assert blend_shares(state(4), directories) == (BlendShare("/data/a", 0.5, 3), BlendShare("/data/b", 0.5, 1))


def test_names_are_kept_as_they_can_be_shown() -> None:
    (one, other) = blend_shares(state(4), {"a": "/x/" + "y" * 500, "b": "\udc80\n"})
    assert one.stream == "y" * 400
    assert other.stream == "\\udc80\\n"


def test_of_too_many_streams_nothing_is_kept() -> None:
    count = MAX_SHARES + 1
    names = tuple(str(number) for number in range(count))
    part = BlendPartState(1, 1, 0, tuple(range(count)), ((0, (1,) * count, 0),), ((0, 0),) * count)
    assert blend_shares(BlendState(names, (run(0),) * count, (part,), 0), {}) == ()


def test_what_each_has_given() -> None:
    assert given_shares(SHARES) == [0.75, 0.25]
    assert given_shares([BlendShare("a", 1.0, 0)]) == [None]


@pytest.mark.parametrize(
    ("blend", "field"),
    [
        ("a", "blend"),
        ([], "blend"),
        ([1], r"blend\[0\]"),
        ([{"stream": "", "weight": 1, "consumed": 0}], r"blend\[0\].stream"),
        ([{"stream": "x" * 401, "weight": 1, "consumed": 0}], r"blend\[0\].stream"),
        ([{"stream": "a", "weight": 1.1, "consumed": 0}], r"blend\[0\].weight"),
        ([{"stream": "a", "weight": True, "consumed": 0}], r"blend\[0\].weight"),
        ([{"stream": "a", "weight": 1, "consumed": -1}], r"blend\[0\].consumed"),
        ([{"stream": "a", "weight": 1}], r"blend\[0\].consumed"),
        ([{"stream": "a", "weight": 1, "consumed": 0}] * 65, "blend"),
    ],
)
def test_what_is_no_blend_is_refused(blend: Any, field: str) -> None:
    with pytest.raises(FileInvalid, match=f"field '{field}': expected "):
        Cursor.decode(changed(GOLDEN, blend=blend), "sft")
