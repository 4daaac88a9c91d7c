"""Tables as sources: Parquet and Arrow files, directories of them, data sets of Hugging Face; what values become."""

import datetime
import decimal
import json
import os
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest

from lazyshard.errors import RowInvalid
from lazyshard_producer.errors import ExtraMissing, SourceRefused
from lazyshard_producer.sources.arrow_rows import ArrowRowEncoder
from lazyshard_producer.sources.source import Context, RowOrigin
from lazyshard_producer.sources.tables import TableSource, find_data_files, is_hugging_face
from tests.harness.processes.commands import Commands
from tests.producer.commands import peak_growth
from tests.producer.sources.reading import lines, parsed, refusal, take
from tests.stream.streams import raised, refusal_of

pa = pytest.importorskip("pyarrow", reason="needs pyarrow: pip install 'lazyshard[arrow]'")
pq = pytest.importorskip("pyarrow.parquet")
pytest.importorskip("pyarrow.compute")
ROWS: Final = {"small": 4096, "large": 160 * 1024}
MAP = pa.map_(pa.string(), pa.int8())
UNCHECKED = pa.Array.from_buffers(pa.string(), 1, pa.array([b"a\xffb"], pa.binary()).buffers())
SECOND = 1_700_000_000


def opened(path: Path, position: Any = None, kind: str | None = None) -> "closing[TableSource]":
    kind = kind or {".arrow": "arrow", ".stream": "arrow"}.get(path.suffix, "parquet")
    return closing(TableSource(kind, str(path), position, Context(path.parent / "stream", 1 << 20)))


def values(path: Path, position: Any = None, kind: str | None = None) -> list[Any]:
    """All rows, parsed; of a refused one the reason."""
    with opened(path, position, kind) as source:
        return list(map(parsed, lines(source)))


def table_of(first: int, last: int) -> Any:
    return pa.table({"id": pa.array(range(first, last), pa.int64())})


def of(numbers: Any) -> list[dict[str, int]]:
    return [{"id": number} for number in numbers]


def write(path: Path, table: Any, rows: int | None = 4, **options: Any) -> None:
    """Writes a table as its name says: groups or batches of so many rows."""
    if path.suffix == ".parquet":
        pq.write_table(table, path, row_group_size=rows, **options)
        return
    new = pa.ipc.new_file if path.suffix == ".arrow" else pa.ipc.new_stream
    with pa.OSFile(str(path), "wb") as sink, new(sink, table.schema, options=pa.ipc.IpcWriteOptions(**options)) as out:
        out.write_table(table, max_chunksize=rows)


def write_ids(path: Path, *numbers: int) -> None:
    pq.write_table(pa.table({"id": list(numbers)}), path)


@pytest.mark.parametrize(
    ("name", "rows", "compression"),
    [("a.parquet", 3, None), ("a.parquet", None, "zstd"), ("a.arrow", 3, "zstd"), ("a.stream", 1, None)],
)
def test_rows_places_and_positions(name: str, rows: int | None, compression: str | None, tmp_path: Path) -> None:
    path = tmp_path / name
    write(path, table_of(0, 10), rows, compression=compression or ("none" if "parquet" in name else None))
    with opened(path) as source:
        assert (source.name, source.live, source.blank, source.start) == (str(path), False, 0, (0, 0))
        start = source.entry(source.start)
        taken = take(source)
        # Marks may lie behind what was read: a later run gives them again.
        assert source.entry(source.start) == start
        assert values(path, start) == [parsed(line) for line, _, _ in taken] == of(range(10))
        places = [piece.place(index) for _, piece, index in taken]
        assert places == [RowOrigin(str(path), number, None) for number in range(1, 11)]
        assert source.progress == (path.stat().st_size, path.stat().st_size)
        assert source.read() is None
        for count, (_, piece, index) in enumerate(taken, 1):
            assert piece.position(index) == (0, count)
            assert values(path, source.entry(piece.position(index))) == of(range(count, 10))
    source.close()
    assert taken[9][0] == b'{"id":9}\n'  # a batch outlives its source


def test_a_directory_is_read_by_name_and_each_file_keeps_its_columns(tmp_path: Path) -> None:
    for number, name in enumerate(["b.parquet", "a.parquet", "_metadata.parquet", ".c.parquet", "d.txt", "B.parquet"]):
        write_ids(tmp_path / name, number)
    write(tmp_path / "aa.parquet", table_of(0, 0))
    (tmp_path / "e.parquet").mkdir()
    tables = [[{"x": 1}], [{"y": "2", "x": None}], [{"image": {"bytes": b"\x89PNG", "path": "a"}}, {"image": None}]]
    for number, rows in enumerate(tables):
        write(tmp_path / f"{number}.parquet", pa.Table.from_pylist(rows))
    image = {"image": {"bytes": "iVBORw==", "path": "a"}}
    assert values(tmp_path) == [{"x": 1}, {"y": "2", "x": None}, image, {"image": None}, *of([5, 1, 0])]


def test_restarting_passes_over_row_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.parquet"
    write(path, table_of(0, 100), 10)
    with opened(path) as source:
        _, piece, index = take(source)[84]
        position = source.entry(piece.position(index))
    groups: list[int] = []
    iter_batches = pq.ParquetFile.iter_batches

    def listen(self: Any, *, row_groups: list[int], **options: Any) -> Any:
        groups.extend(row_groups)
        return iter_batches(self, row_groups=row_groups, **options)

    monkeypatch.setattr(pq.ParquetFile, "iter_batches", listen)
    assert values(path, position) == of(range(85, 100))
    assert groups == [8, 9]


@pytest.mark.parametrize(
    ("name", "content", "actual"),
    [
        ("a.parquet", b'{"id":1}\n', "something else"),
        ("a.parquet", b"PAR1" + b"x" * 100, "one of 104 bytes without its end"),
        ("a.parquet", b"PARE" + b"x" * 100 + b"PARE", "an encrypted one"),
        ("a.parquet", b"PAR1" + b"x" * 100 + b"\xff\xff\0\0PAR1", ""),
        ("a.arrow", b"", "an empty file"),
        ("a.arrow", b'{"id":1}\n', "something else"),
        ("a.arrow", b"FEA1" + b"\0" * 100, "something else"),
        ("a.arrow", b"ARROW1" + b"x" * 100, ""),
    ],
)
def test_what_is_no_table(name: str, content: bytes, actual: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    error = refusal(opened, path)
    assert error.file == str(path)
    assert str(error.actual).startswith(actual)


@pytest.mark.parametrize("name", ["a.arrow", "a.stream"])
def test_an_arrow_file_that_was_cut_short(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    write(path, table_of(0, 1000), 100)
    size = path.stat().st_size
    for kept in (size * 9 // 10, size // 2, 20, 3):
        os.truncate(path, kept)
        assert refusal(values, path).file == str(path)


def test_damage_within_a_file(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    write(path, table_of(0, 1000), 1000, compression="zstd", use_dictionary=False)
    data = bytearray(path.read_bytes())
    data[40:200] = b"\xaa" * 160
    path.write_bytes(data)
    assert refusal(values, path).file == str(path)
    path = tmp_path / "a.stream"
    write(path, pa.table({"text": ["aaaa", "bbbb", "cccc"]}))
    good, bad = (b"".join(number.to_bytes(4, "little") for number in (0, end, 8, 12)) for end in (4, 2**30))
    whole = path.read_bytes()
    assert whole.count(good) == 1
    path.write_bytes(whole.replace(good, bad))
    assert refusal(values, path).file == str(path)
    path.write_bytes(whole.replace(b"bbbb", b"b\xffbb"))
    first, reason, third = values(path)
    assert (first, third) == ({"text": "aaaa"}, {"text": "cccc"})
    assert "byte 0xff at 1" in reason
    write(tmp_path / "twice.parquet", pa.table([[1], [2]], names=["x", "x"]))
    assert refusal(opened, tmp_path / "twice.parquet").expected == "a unique name for every column"


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_what_cannot_be_opened(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.mkfifo(tmp_path / "pipe")
    for name in ("pipe", "none"):
        assert refusal(opened, tmp_path / name, None, kind).file == str(tmp_path / name)
    assert refusal(opened, tmp_path, None, kind).expected == f"files *.{kind}"
    (tmp_path / "year=2025").mkdir()
    assert "year=2025" in str(refusal(opened, tmp_path, None, kind).actual)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    missing = raised(ExtraMissing, opened, tmp_path / "a", None, kind)
    assert (missing.package, missing.extra) == ("pyarrow", "arrow")


def read_up_to(directory: Path, rows: int) -> dict[str, Any]:
    """A directory of the files b, d and f, of two rows each, and the position after some of these."""
    for number, name in enumerate("bdf"):
        write_ids(directory / f"{name}.parquet", 2 * number, 2 * number + 1)
    with opened(directory) as source:
        _, piece, index = take(source, rows)[-1]
        return source.entry(piece.position(index))


@pytest.mark.parametrize(("rows", "rest"), [(2, [2, 3, 8, 4, 5, 9]), (3, [3, 8, 4, 5, 9]), (4, [8, 4, 5, 9])])
def test_later_files_may_come_and_those_not_begun_may_change(rows: int, rest: list[int], tmp_path: Path) -> None:
    position = read_up_to(tmp_path, rows)
    write_ids(tmp_path / "e.parquet", 8)
    write_ids(tmp_path / "g.parquet", 9)
    assert values(tmp_path, position) == of(rest)
    write_ids(tmp_path / "f.parquet", 7)
    assert values(tmp_path, position) == of([*rest[: rest.index(4)], 7, 9])


@pytest.mark.parametrize(
    ("change", "file", "says"),
    [
        (lambda path: write_ids(path / "a.parquet", 9), "", "file 1 .* a.parquet, which is new"),
        (lambda path: write_ids(path / "c.parquet", 9), "", "file 2 .* c.parquet, which is new"),
        (lambda path: write_ids(path / "b.parquet", 0, 7), "b.parquet", "another"),
        (lambda path: (path / "b.parquet").unlink(), "", "file 1 .* missing"),
        (lambda path: (path / "d.parquet").unlink(), "f.parquet", "another"),
        (lambda path: write_ids(path / "d.parquet", 2, 7), "d.parquet", "another"),
        (lambda path: os.truncate(path / "d.parquet", 9), "d.parquet", "another"),
    ],
)
def test_what_is_begun_must_stay_as_it_was(change: Callable[[Path], Any], file: str, says: str, tmp_path: Path) -> None:
    position = read_up_to(tmp_path, 3)
    assert position.items() >= {"kind": "parquet", "path": str(tmp_path), "files": 1, "row": 1}.items()
    change(tmp_path)
    assert refusal_of(SourceRefused, says, opened, tmp_path, position).file == str(tmp_path / file)


def test_a_position_that_is_none_of_this_source(tmp_path: Path) -> None:
    position = read_up_to(tmp_path, 3)
    wrong: dict[str, list[Any]] = {"kind": ["arrow"], "path": ["elsewhere"], "files": [-1], "xxh3": ["AAA", "AAAA", 7]}
    wrong["row"] = [None, True, 0]  # at row 0 no fingerprint of a second file is expected
    for change in ({field: value} for field, values in wrong.items() for value in values):
        assert "no position to continue from" in str(refusal(opened, tmp_path, position | change))


def test_a_file_that_is_replaced_or_truncated_while_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    write_ids(path, 0, 1)
    with opened(path) as source:
        taken = take(source, 2)
        os.utime(path, ns=(1, 1))
        assert values(path, source.entry(taken[0][1].position(0))) == of([1])
        write_ids(tmp_path / "new", 5, 6)
        os.replace(tmp_path / "new", path)
        assert refusal(source.entry, taken[0][1].position(0)).file == str(path)
        assert refusal(source.read).file == str(path)
    for name in ("a.arrow", "a.stream"):
        write(tmp_path / name, table_of(0, 10_000), None)
        with opened(tmp_path / name) as source:
            assert source.read() is not None
            os.truncate(tmp_path / name, 4096)
            assert refusal(source.read).file == str(tmp_path / name)


def read(path: Path) -> None:
    with opened(path) as source:
        assert sum(len(piece.lines) for piece in iter(source.read, None)) == ROWS[path.stem]


def growth_of_second(first: Path, second: Path) -> object:
    # The first one brings what does not depend on the size: pyarrow's own state, and its buffers.
    read(first)
    return peak_growth(read, second)


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", ["parquet", "stream"])
def test_one_row_group_or_batch_of_160_mib_is_not_held_whole(kind: str, nursery: Commands, tmp_path: Path) -> None:
    options = {"compression": "none", "use_dictionary": False} if kind == "parquet" else {}
    for name, rows in ROWS.items():
        text = pa.array([f"{number:01024d}" for number in range(rows)])
        write(tmp_path / f"{name}.{kind}", pa.table({"text": text}).combine_chunks(), rows, **options)
    ended = nursery.call(growth_of_second, *(tmp_path / f"{name}.{kind}" for name in ROWS))
    assert ended.status == 0, ended.said
    assert int(ended.left) < 48 << 20


def test_a_saved_data_set(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    folder = tmp_path / "d"
    rows = [{"id": number, "messages": [{"role": "user", "content": f"{number}"}]} for number in range(10)]
    datasets.Dataset.from_list(rows).save_to_disk(folder, num_shards=3)
    assert is_hugging_face(str(folder))
    with opened(folder, kind="huggingface") as source:
        taken = take(source)
        _, piece, index = taken[4]
        assert piece.place(index) == RowOrigin(str(folder / "data-00001-of-00003.arrow"), 1, None)
        _, piece, index = taken[5]
        position = source.entry(piece.position(index))
    assert (position["kind"], position["files"], position["row"]) == ("huggingface", 1, 2)
    assert values(folder, None, "huggingface") == rows
    assert values(folder, position, "huggingface") == rows[6:]


def test_data_sets_that_were_selected_or_are_several(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    assert not is_hugging_face(str(tmp_path)) and not is_hugging_face(str(tmp_path / "none"))
    state = {"_data_files": [{"filename": "b"}, {"filename": "a"}], "_indices_files": None}
    (tmp_path / "state.json").write_text(json.dumps(state))
    assert find_data_files(str(tmp_path)) == [str(tmp_path / "b"), str(tmp_path / "a")]
    of_ids = datasets.Dataset.from_dict({"id": list(range(10))})
    of_ids.select([7, 3, 5]).save_to_disk(tmp_path / "selected")
    assert values(tmp_path / "selected", None, "huggingface") == of([7, 3, 5])
    datasets.DatasetDict({"train": of_ids, "test": of_ids}).save_to_disk(tmp_path / "d")
    assert is_hugging_face(str(tmp_path / "d"))
    error = refusal(opened, tmp_path / "d", None, "huggingface")
    assert f"{tmp_path}/d/train, {tmp_path}/d/test" in str(error.actual)
    assert values(tmp_path / "d" / "train", None, "huggingface") == of(range(10))


@pytest.mark.parametrize(
    ("name", "state", "file"),
    [
        ("state.json", {"_data_files": [{"filename": "a.arrow"}], "_indices_files": [{"filename": "i"}]}, ""),
        ("state.json", {"_data_files": []}, "state.json"),
        ("state.json", {"_data_files": [{"filename": "../a.arrow"}]}, "state.json"),
        ("state.json", {"_data_files": [{"filename": "a.arrow"}, "b"]}, "state.json"),
        ("state.json", "{", "state.json"),
        ("dataset_info.json", {}, ""),  # a folder of the cache
    ],
)
def test_a_data_set_that_cannot_be_used(name: str, state: Any, file: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(state if state == "{" else json.dumps(state))
    assert is_hugging_face(str(tmp_path))
    assert refusal(find_data_files, str(tmp_path)).file == str(tmp_path / file)


def encoded(array: Any, max_row_bytes: int = 1 << 20) -> list[Any]:
    """A column "a" of these values as JSON and back; a refused row as its reason."""
    batch = pa.record_batch({"a": array})
    lines = ArrowRowEncoder(pa, batch.schema, max_row_bytes).encode(batch)
    return [line.reason if isinstance(line, RowInvalid) else json.loads(line)["a"] for line in lines]


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
            pa.array([[{"x": b"a"}], [], [{"x": None}, {"x": b"b"}]]),
            [[{"x": "YQ=="}], [], [{"x": None}, {"x": "Yg=="}]],
        ),
        (pa.array([{"x": [b"a", b"b"]}, None, {"x": [b"c"]}]), [{"x": ["YQ==", "Yg=="]}, None, {"x": ["Yw=="]}]),
        (pa.array([[[1], [2, 3]], [[4]], None], pa.list_(pa.large_list(pa.int8()))), [[[1], [2, 3]], [[4]], None]),
        (pa.array([[("k", 1), ("l", None)], None, []], MAP), [{"k": 1, "l": None}, None, {}]),
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
    assert encoded(array.slice(1)) == expected[1:]


def celsius() -> Any:
    methods = {
        "__init__": lambda self: pa.ExtensionType.__init__(self, pa.binary(), "test.celsius"),
        "__arrow_ext_serialize__": lambda self: b"",
    }
    return type("Celsius", (pa.ExtensionType,), methods)()


NEWER: Final[dict[str, Callable[[], tuple[Any, list[Any]]]]] = {
    "string_view": lambda: (pa.array(["x", None], pa.string_view()), ["x", None]),
    "binary_view": lambda: (pa.array([b"x", None], pa.binary_view()), ["eA==", None]),
    "list_view": lambda: (pa.array([[b"x"], None], pa.list_view(pa.binary())), [["eA=="], None]),
    "run_end_encoded": lambda: (pa.compute.run_end_encode(pa.array(["x", "x", "y"])), ["x", "x", "y"]),
    "ExtensionType": lambda: (pa.ExtensionArray.from_storage(celsius(), pa.array([b"x", None])), ["eA==", None]),
    "uuid": lambda: (pa.array([b"0123456789abcdef"], pa.uuid()), ["30313233-3435-3637-3839-616263646566"]),
}


@pytest.mark.parametrize("name", [name for name in NEWER if hasattr(pa, name)])
def test_values_of_newer_types_and_of_an_extension(name: str) -> None:
    array, expected = NEWER[name]()
    assert encoded(array) == expected


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
        (pa.array([[("k", 1), ("k", 2)]], MAP), "column 'a': a map that contains a key twice"),
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


def test_the_longest_row_and_one_nested_deeper_than_json_writers_go() -> None:
    assert encoded(pa.array(["x" * 91]), max_row_bytes=99) == ["x" * 91]
    value: Any = 1
    for _ in range(300):
        value = [value]
    (reason,) = encoded(pa.array([value]))
    assert reason.startswith("column 'a': cannot be written as JSON")


def test_two_fields_of_one_name_and_no_column_at_all() -> None:
    twice = pa.struct([pa.field("a", pa.int8()), pa.field("a", pa.int8())])
    with pytest.raises(ValueError, match="named 'a'"):
        ArrowRowEncoder(pa, pa.schema([("x", pa.list_(twice))]), 100)
    batch = pa.RecordBatch.from_struct_array(pa.array([{}, {}], pa.struct([])))
    assert ArrowRowEncoder(pa, batch.schema, 100).encode(batch) == [b"{}\n", b"{}\n"]
