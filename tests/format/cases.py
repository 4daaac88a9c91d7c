"""What the tests of the file formats share: how to spoil a file, and how to look at a refusal."""

from collections.abc import Callable
from typing import Any, Final

import orjson
from hypothesis import strategies as st

from lazyshard.errors import FormatInvalid
from tests.stream.streams import raised

finite: Final = st.floats(allow_nan=False, allow_infinity=False)
integers: Final = st.integers(-(2**63), 2**64 - 1)  # all that a row can hold


def json_of(leaves: st.SearchStrategy[Any], keys: st.SearchStrategy[str], most: int) -> st.SearchStrategy[Any]:
    """Lists and objects with so many of these values at the most."""

    def extend(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
        return st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=3)

    return st.recursive(leaves, extend, max_leaves=most)


def changed(data: bytes, **values: Any) -> bytes:
    return orjson.dumps(orjson.loads(data) | values)


def with_field(data: bytes, path: str, value: Any) -> Any:
    """What the file says, with the field at a path like `parts.0.dp` replaced."""
    values = orjson.loads(data)
    at = values
    *parents, last = [int(step) if step.isdigit() else step for step in path.split(".")]
    for step in parents:
        at = at[step]
    at[last] = value
    return values


def without(data: bytes, field: str) -> bytes:
    values = orjson.loads(data)
    del values[field]
    return orjson.dumps(values)


def refusal(decode: Callable[[], object], error: type[FormatInvalid], file: str, field: str | None) -> FormatInvalid:
    """The error with which the decoder refuses a field of a file; its message says all that it says in its fields."""
    found = raised(error, decode)
    assert (type(found), found.file, found.field) == (error, file, field)
    assert all(str(said) in str(found) for said in (file, field or file, found.expected, found.actual))
    return found
