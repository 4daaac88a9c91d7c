import datetime
import decimal
import json
from collections.abc import Callable
from typing import Any, Final

import numpy as np
import pytest

from lazyshard.errors import RowInvalid
from lazyshard_producer.sources.arrow_rows import ArrowRowEncoder

pa = pytest.importorskip("pyarrow", reason="needs pyarrow: pip install 'lazyshard[arrow]'")
pytest.importorskip("pyarrow.compute")


def encoded(array: Any, max_row_bytes: int = 1 << 20) -> list[Any]:
    """A column "a" of these values as JSON and back; a refused row as its reason."""
    batch = pa.record_batch({"a": array})
    lines = ArrowRowEncoder(pa, batch.schema, max_row_bytes).encode(batch)
    return [line.reason if isinstance(line, RowInvalid) else json.loads(line)["a"] for line in lines]


# Text with bytes that nobody has checked, as files have them.
UNCHECKED = pa.Array.from_buffers(pa.string(), 1, pa.array([b"a\xffb"], pa.binary()).buffers())
SECOND = 1_700_000_000


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
        # Of nested values too a part shares the buffers of the rest.
        (
            pa.array([[{"x": b"a"}], [], [{"x": None}, {"x": b"b"}]]),
            [[{"x": "YQ=="}], [], [{"x": None}, {"x": "Yg=="}]],
        ),
        (pa.array([{"x": [b"a", b"b"]}, None, {"x": [b"c"]}]), [{"x": ["YQ==", "Yg=="]}, None, {"x": ["Yw=="]}]),
        (pa.array([[[1], [2, 3]], [[4]], None], pa.list_(pa.large_list(pa.int8()))), [[[1], [2, 3]], [[4]], None]),
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
        (pa.array([datetime.date(2026, 1, 2), None]), ["2026-01-02", None]),
        (pa.array([3661], pa.time32("s")), ["01:01:01"]),
        (pa.array([[SECOND]], pa.list_(pa.timestamp("s"))), [["2023-11-14T22:13:20"]]),
    ],
    ids=lambda value: str(value.type) if hasattr(value, "type") else "",
)
def test_values(array: Any, expected: list[Any]) -> None:
    assert encoded(array) == expected
    # A part of a column shares its buffers with the rest.
    assert encoded(array.slice(1)) == expected[1:]


NEWER: Final[dict[str, Callable[[], tuple[Any, list[Any]]]]] = {
    "string_view": lambda: (pa.array(["x", None], pa.string_view()), ["x", None]),
    "binary_view": lambda: (pa.array([b"x", None], pa.binary_view()), ["eA==", None]),
    "list_view": lambda: (pa.array([[b"x"], None], pa.list_view(pa.binary())), [["eA=="], None]),
    "run_end_encoded": lambda: (pa.compute.run_end_encode(pa.array(["x", "x", "y"])), ["x", "x", "y"]),
    "uuid": lambda: (pa.array([b"0123456789abcdef"], pa.uuid()), ["30313233-3435-3637-3839-616263646566"]),
}


@pytest.mark.parametrize("name", [name for name in NEWER if hasattr(pa, name)])
def test_values_of_newer_types(name: str) -> None:
    array, expected = NEWER[name]()
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
        (pa.array([float("nan")]), "column 'a': NaN"),
        (pa.array([[0.0, float("-inf")]]), "column 'a[1]': an infinity"),
        (pa.array([{"b": [float("nan")]}]), "column 'a.b[0]': NaN"),
        (pa.array([decimal.Decimal("1.10")]), "column 'a': a value of type decimal128(3, 2)"),
        (pa.array([datetime.timedelta(1)]), "column 'a': a value of type duration[us]"),
        (UNCHECKED, "column 'a': text that is not UTF-8 (byte 0xff at 1)"),
        (pa.array([10**12], pa.timestamp("s")), "column 'a': a date"),
        (pa.array([10**7], pa.date32()), "column 'a': a date"),
        (
            pa.array([[("k", 1), ("k", 2)]], pa.map_(pa.string(), pa.int8())),
            "column 'a': a map that contains a key twice",
        ),
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


def test_two_fields_of_one_name() -> None:
    twice = pa.struct([pa.field("a", pa.int8()), pa.field("a", pa.int8())])
    with pytest.raises(ValueError, match="named 'a'"):
        ArrowRowEncoder(pa, pa.schema([("x", pa.list_(twice))]), 100)


def test_rows_without_columns() -> None:
    batch = pa.RecordBatch.from_struct_array(pa.array([{}, {}], pa.struct([])))
    assert ArrowRowEncoder(pa, batch.schema, 100).encode(batch) == [b"{}\n", b"{}\n"]
