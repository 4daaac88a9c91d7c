import base64
import datetime
import decimal
import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lazyshard.errors import RowInvalid
from lazyshard_producer.sources.arrow_rows import ArrowRowEncoder

pa = pytest.importorskip("pyarrow", reason="needs pyarrow: pip install 'lazyshard[arrow]'")
pytest.importorskip("pyarrow.compute")


def encoded(array: Any, max_row_bytes: int = 1 << 20) -> list[Any]:
    """A column "a" of these values as JSON and back; a refused row as its reason."""
    batch = pa.record_batch({"a": array})
    lines = ArrowRowEncoder(pa, batch.schema, max_row_bytes).encode(batch)
    return [line.reason if isinstance(line, RowInvalid) else json.loads(line)["a"] for line in lines]


def text_of(*values: bytes | None) -> Any:
    """A column of text with bytes that nobody has checked, as files have them."""
    binary = pa.array(values, pa.binary())
    return pa.Array.from_buffers(pa.string(), len(values), binary.buffers())


SECOND = 1_700_000_000
DAY = datetime.date(2026, 1, 2)


@pytest.mark.parametrize(
    ("array", "expected"),
    [
        (pa.array([1, None, -(2**63)]), [1, None, -(2**63)]),
        (pa.array([2**64 - 1], pa.uint64()), [2**64 - 1]),
        (pa.array([True, None]), [True, None]),
        (pa.array([None, None]), [None, None]),
        (pa.array([1.5, None, 1e300]), [1.5, None, 1e300]),
        (pa.array(np.array([1.5, 2], np.float16)), [1.5, 2.0]),
        (pa.array(["ü\n\u2028", "", None]), ["ü\n\u2028", "", None]),
        (pa.array(["x"], pa.large_string()), ["x"]),
        (pa.array([b"\xff\x00", b"", None]), ["/wA=", "", None]),
        (pa.array([b"ab"], pa.binary(2)), ["YWI="]),
        (pa.array([[1, 2], None, []]), [[1, 2], None, []]),
        (pa.array([[b"a"], None, [None]], pa.list_(pa.binary())), [["YQ=="], None, [None]]),
        (pa.array([[b"a", b"b"], None], pa.list_(pa.binary(), 2)), [["YQ==", "Yg=="], None]),
        (
            pa.array([{"b": b"x", "c": 1}, None, {"b": None, "c": 2}]),
            [{"b": "eA==", "c": 1}, None, {"b": None, "c": 2}],
        ),
        (pa.array([{}, None], pa.struct([])), [{}, None]),
        (
            pa.array([[("k", 1), ("l", None)], None, []], pa.map_(pa.string(), pa.int8())),
            [{"k": 1, "l": None}, None, {}],
        ),
        (pa.array([[(7, "v")]], pa.map_(pa.int8(), pa.string())), [[{"key": 7, "value": "v"}]]),
        (pa.array(["x", None, "x"]).dictionary_encode(), ["x", None, "x"]),
        (pa.array([b"x", None]).dictionary_encode(), ["eA==", None]),
        (pa.array([SECOND, None], pa.timestamp("s")), ["2023-11-14T22:13:20", None]),
        (pa.array([SECOND * 10**9 + 5], pa.timestamp("ns")), ["2023-11-14T22:13:20.000000005"]),
        (pa.array([SECOND * 1000], pa.timestamp("ms", "Europe/Berlin")), ["2023-11-14T22:13:20.000Z"]),
        (pa.array([SECOND * 10**6], pa.timestamp("us", "+05:30")), ["2023-11-14T22:13:20.000000Z"]),
        (pa.array([DAY, None]), ["2026-01-02", None]),
        (pa.array([3661], pa.time32("s")), ["01:01:01"]),
        (pa.array([[SECOND]], pa.list_(pa.timestamp("s"))), [["2023-11-14T22:13:20"]]),
    ],
    ids=lambda value: str(value.type) if hasattr(value, "type") else "",
)
def test_values(array: Any, expected: list[Any]) -> None:
    assert encoded(array) == expected
    # A part of a column shares its buffers with the rest.
    assert encoded(array.slice(1)) == expected[1:]


@pytest.mark.parametrize("name", ["string_view", "binary_view", "list_view", "run_end_encoded", "uuid"])
def test_values_of_newer_types(name: str) -> None:
    if not hasattr(pa, name):
        pytest.skip(f"this pyarrow has no {name}")
    makers: dict[str, Callable[[], tuple[Any, list[Any]]]] = {
        "string_view": lambda: (pa.array(["x", None], pa.string_view()), ["x", None]),
        "binary_view": lambda: (pa.array([b"x", None], pa.binary_view()), ["eA==", None]),
        "list_view": lambda: (pa.array([[b"x"], None], pa.list_view(pa.binary())), [["eA=="], None]),
        "run_end_encoded": lambda: (pa.compute.run_end_encode(pa.array(["x", "x", "y"])), ["x", "x", "y"]),
        "uuid": lambda: (pa.array([b"0123456789abcdef"], pa.uuid()), ["30313233-3435-3637-3839-616263646566"]),
    }
    array, expected = makers[name]()
    assert encoded(array) == expected


def test_an_extension_type_is_its_storage() -> None:
    methods = {
        "__init__": lambda self: pa.ExtensionType.__init__(self, pa.binary(), "test.celsius"),
        "__arrow_ext_serialize__": lambda self: b"",
    }
    kind = type("Celsius", (pa.ExtensionType,), methods)()
    array = pa.ExtensionArray.from_storage(kind, pa.array([b"x", None]))
    assert encoded(array) == ["eA==", None]


@pytest.mark.parametrize(
    ("array", "reason"),
    [
        (pa.array([float("nan")]), "column 'a': NaN, which JSON does not have; write null instead"),
        (pa.array([[0.0, float("-inf")]]), "column 'a[1]': an infinity"),
        (pa.array([{"b": [float("nan")]}]), "column 'a.b[0]': NaN"),
        (pa.array([decimal.Decimal("1.10")]), "column 'a': a value of type decimal128(3, 2), a decimal, which JSON"),
        (pa.array([datetime.timedelta(1)]), "column 'a': a value of type duration[us], not a value of JSON"),
        (text_of(b"a\xffb"), "column 'a': text that is not UTF-8 (byte 0xff at 1)"),
        (pa.array([10**12], pa.timestamp("s")), "column 'a': a date outside the years 0 to 9999"),
        (pa.array([10**7], pa.date32()), "column 'a': a date outside the years 0 to 9999"),
        (pa.array([[("k", 1), ("k", 2)]], pa.map_(pa.string(), pa.int8())), "column 'a': a map that names a key twice"),
        (pa.array(["x" * 92]), "longer than the 99 bytes of --max-row-bytes"),
    ],
)
def test_a_value_that_json_has_not_refuses_its_row_alone(array: Any, reason: str) -> None:
    good = pa.nulls(1, array.type)
    for order in ([array, good], [good, array]):
        found = encoded(pa.concat_arrays(order), max_row_bytes=99)
        bad = found.pop(order.index(array))
        assert found == [None]
        assert bad.startswith(reason)


def test_the_longest_row() -> None:
    assert encoded(pa.array(["x" * 91]), max_row_bytes=99) == ["x" * 91]


def test_a_row_nested_deeper_than_json_writers_go() -> None:
    value: Any = 1
    for _ in range(300):
        value = [value]
    (reason,) = encoded(pa.array([value]))
    assert reason.startswith("column 'a': cannot be written as JSON")


@pytest.mark.parametrize(
    "schema",
    [
        pa.schema([("a", pa.int8()), ("a", pa.int8())]),
        pa.schema([("x", pa.list_(pa.struct([pa.field("a", pa.int8()), pa.field("a", pa.int8())])))]),
    ],
)
def test_two_columns_of_one_name(schema: Any) -> None:
    with pytest.raises(ValueError, match="named 'a'"):
        ArrowRowEncoder(pa, schema, 100)


def test_rows_without_columns() -> None:
    batch = pa.RecordBatch.from_struct_array(pa.array([{}, {}], pa.struct([])))
    assert ArrowRowEncoder(pa, batch.schema, 100).encode(batch) == [b"{}\n", b"{}\n"]


def kinds() -> st.SearchStrategy[Any]:
    leaves = st.sampled_from([pa.int8(), pa.string(), pa.binary(), pa.bool_()])
    names = st.lists(st.sampled_from("xyz"), max_size=2, unique=True)
    return st.recursive(
        leaves,
        lambda inner: (
            inner.map(pa.list_)
            | inner.map(pa.large_list)
            | st.builds(lambda names, kind: pa.struct([(name, kind) for name in names]), names, inner)
            | inner.map(lambda kind: pa.map_(pa.string(), kind))
        ),
        max_leaves=4,
    )


def values_of(kind: Any) -> st.SearchStrategy[tuple[Any, Any]]:
    """Pairs of a value as pyarrow takes it and as JSON has it."""
    pairs: st.SearchStrategy[tuple[Any, Any]]
    if pa.types.is_struct(kind):
        fields = {kind.field(index).name: values_of(kind.field(index).type) for index in range(kind.num_fields)}
        pairs = st.fixed_dictionaries(fields).map(
            lambda row: ({name: pair[0] for name, pair in row.items()}, {name: pair[1] for name, pair in row.items()})
        )
    elif pa.types.is_map(kind):
        pairs = st.dictionaries(st.text("kl", max_size=2), values_of(kind.item_type), max_size=3).map(
            lambda row: ([(key, pair[0]) for key, pair in row.items()], {key: pair[1] for key, pair in row.items()})
        )
    elif pa.types.is_list(kind) or pa.types.is_large_list(kind):
        pairs = st.lists(values_of(kind.value_type), max_size=3).map(
            lambda items: ([pair[0] for pair in items], [pair[1] for pair in items])
        )
    elif pa.types.is_binary(kind):
        pairs = st.binary(max_size=3).map(lambda value: (value, base64.b64encode(value).decode()))
    elif pa.types.is_boolean(kind):
        pairs = st.booleans().map(lambda value: (value, value))
    elif pa.types.is_integer(kind):
        pairs = st.integers(-128, 127).map(lambda value: (value, value))
    else:
        pairs = st.text(max_size=3).map(lambda value: (value, value))
    return st.just((None, None)) | pairs


@given(st.data())
def test_nested_values_of_any_part_of_a_column(data: st.DataObject) -> None:
    kind = data.draw(kinds())
    pairs = data.draw(st.lists(values_of(kind), max_size=6))
    first = data.draw(st.integers(0, len(pairs)))
    last = data.draw(st.integers(first, len(pairs)))
    array = pa.array([pair[0] for pair in pairs], kind)
    assert encoded(array.slice(first, last - first)) == [pair[1] for pair in pairs[first:last]]
