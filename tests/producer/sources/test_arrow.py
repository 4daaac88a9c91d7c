import os
from pathlib import Path
from typing import Any

import pytest

from lazyshard_producer.errors import SourceRefused
from tests.producer.sources.table_sources import open_table_source, read_rows, values

pa = pytest.importorskip("pyarrow", reason="needs pyarrow: pip install 'lazyshard[arrow]'")

FORMATS = {"file": lambda *a, **k: pa.ipc.new_file(*a, **k), "stream": lambda *a, **k: pa.ipc.new_stream(*a, **k)}


def write(path: Path, table: Any, format: str = "stream", rows_per_batch: int | None = None, **options: Any) -> None:
    sink = pa.OSFile(str(path), "wb")
    with sink, FORMATS[format](sink, table.schema, options=pa.ipc.IpcWriteOptions(**options)) as writer:
        writer.write_table(table, max_chunksize=rows_per_batch)


def ids(first: int, last: int) -> Any:
    return pa.table({"id": list(range(first, last))})


@pytest.mark.parametrize("compression", [None, "zstd"])
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("rows_per_batch", [1, 3, None])
def test_rows(tmp_path: Path, format: str, rows_per_batch: int | None, compression: str | None) -> None:
    path = tmp_path / "a.arrow"
    write(path, ids(0, 10), format, rows_per_batch, compression=compression)
    source = open_table_source("arrow", path)
    rows = read_rows(source)
    assert [row.value for row in rows] == [{"id": number} for number in range(10)]
    assert [row.place for row in rows] == [(str(path), number, None) for number in range(1, 11)]
    assert source.progress == (path.stat().st_size, path.stat().st_size)
    for taken in range(1, 11):
        position = source.entry(rows[taken - 1].position)
        assert values(open_table_source("arrow", path, position)) == [{"id": number} for number in range(taken, 10)]
    source.close()


@pytest.mark.parametrize("format", FORMATS)
def test_dictionaries_that_grow_from_batch_to_batch(tmp_path: Path, format: str) -> None:
    path = tmp_path / "a.arrow"
    batches = [pa.array(["x", "y"]).dictionary_encode(), pa.array(["x", "y", "z"]).dictionary_encode()]
    table = pa.Table.from_batches([pa.record_batch({"a": batch}) for batch in batches])
    write(path, table, format, emit_dictionary_deltas=True)
    assert [row["a"] for row in values(open_table_source("arrow", path))] == ["x", "y", "x", "y", "z"]


def test_one_batch_of_many_rows_comes_in_pieces(tmp_path: Path) -> None:
    path = tmp_path / "a.arrow"
    write(path, pa.table({"text": ["x" * 10_000] * 4000}))
    source = open_table_source("arrow", path)
    pieces = []
    while (piece := source.read()) is not None:
        pieces.append(sum(len(line) for line in piece.lines if isinstance(line, bytes)))
    assert len(pieces) >= 30
    assert max(pieces) <= 2 << 20
    source.close()


def test_a_batch_outlives_its_source(tmp_path: Path) -> None:
    path = tmp_path / "a.arrow"
    write(path, ids(0, 10))
    source = open_table_source("arrow", path)
    piece = source.read()
    assert piece is not None
    source.close()
    assert piece.lines[9] == b'{"id":9}\n'


@pytest.mark.parametrize("format", FORMATS)
def test_truncated_while_it_is_read(tmp_path: Path, format: str) -> None:
    path = tmp_path / "a.arrow"
    write(path, ids(0, 10_000), format)
    source = open_table_source("arrow", path)
    assert source.read() is not None
    os.truncate(path, 4096)
    with pytest.raises(SourceRefused, match=r"a\.arrow: expected the file whose rows were read"):
        source.read()
    source.close()


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("kept", [3, 20, 0.5, 0.9])
def test_cut_short(tmp_path: Path, format: str, kept: float) -> None:
    path = tmp_path / "a.arrow"
    write(path, ids(0, 1000), format, 100)
    size = path.stat().st_size
    os.truncate(path, int(kept * size) if kept < 1 else int(kept))
    with pytest.raises(SourceRefused, match=r"a\.arrow: expected an Arrow IPC file or stream"):
        values(open_table_source("arrow", path))


@pytest.mark.parametrize("content", [b"", b'{"id":1}\n', b"FEA1" + b"\0" * 100, b"ARROW1" + b"x" * 100, b"\xff" * 100])
def test_no_arrow(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "a.arrow"
    path.write_bytes(content)
    with pytest.raises(SourceRefused, match=r"a\.arrow: expected an Arrow IPC file or stream"):
        open_table_source("arrow", path)


def test_offsets_that_point_out_of_the_data(tmp_path: Path) -> None:
    path = tmp_path / "a.arrow"
    write(path, pa.table({"text": ["aaaa", "bbbb", "cccc"]}))
    data = path.read_bytes()
    offsets = b"".join(number.to_bytes(4, "little") for number in (0, 4, 8, 12))
    bad = b"".join(number.to_bytes(4, "little") for number in (0, 2**30, 8, 12))
    assert data.count(offsets) == 1
    path.write_bytes(data.replace(offsets, bad))
    source = open_table_source("arrow", path)
    with pytest.raises(SourceRefused, match="that can be read, found"):
        source.read()
    source.close()


def test_text_that_is_not_utf8_refuses_its_row_alone(tmp_path: Path) -> None:
    path = tmp_path / "a.arrow"
    write(path, pa.table({"text": ["aaaa", "bbbb", "cccc"]}))
    path.write_bytes(path.read_bytes().replace(b"bbbb", b"b\xffbb"))
    first, second, third = values(open_table_source("arrow", path))
    assert (first, third) == ({"text": "aaaa"}, {"text": "cccc"})
    assert second == "refused: column 'text': text that is not UTF-8 (byte 0xff at 1)"
