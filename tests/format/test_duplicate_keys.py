import json
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lazyshard.format.row import has_duplicate_keys

TEXT = st.text(alphabet='ab:"\\\u003a \n', max_size=4)


class Pairs(list[tuple[str, Any]]):
    """An object's members, any key any number of times."""


VALUES = st.recursive(
    st.one_of(st.integers(-5, 5), TEXT, st.none()),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.lists(st.tuples(TEXT, inner), max_size=4).map(lambda pairs: Pairs(pairs))
    ),
    max_leaves=10,
)
OBJECTS = st.lists(st.tuples(TEXT, VALUES), max_size=4).map(lambda pairs: Pairs(pairs))


def text(value: Any, colon: str, escaped: bool) -> str:
    if isinstance(value, Pairs):
        return "{" + ",".join(f"{text(k, '', escaped)}{colon}{text(v, colon, escaped)}" for k, v in value) + "}"
    if isinstance(value, list):
        return "[" + ",".join(text(item, colon, escaped) for item in value) + "]"
    written = json.dumps(value)
    return written.replace(":", "\\u003a") if escaped else written


def twice(value: Any) -> bool:
    if isinstance(value, Pairs):
        return len({k for k, _ in value}) < len(value) or any(twice(v) for _, v in value)
    return isinstance(value, list) and any(map(twice, value))


@given(row=OBJECTS, colon=st.sampled_from([":", ": ", " :", "\t: "]), escaped=st.booleans())
def test_exact(row: Pairs, colon: str, escaped: bool) -> None:
    line = text(row, colon, escaped).encode()
    assert has_duplicate_keys(line, orjson.loads(line)) == twice(row)


@pytest.mark.parametrize("depth", [200, 1000])
def test_deep_nesting_does_not_raise(depth: int) -> None:
    line = b'{"a":' * depth + b"1" + b"}" * depth
    assert not has_duplicate_keys(line, orjson.loads(line))
