import decimal
from pathlib import Path
from typing import Any

import pytest

from lazyshard_producer.errors import SourceRefused
from tests.producer.sources.table_sources import open_table_source, read_rows, values

pa = pytest.importorskip("pyarrow", reason="needs pyarrow: pip install 'lazyshard[arrow]'")
pq = pytest.importorskip("pyarrow.parquet")


def ids(first: int, last: int) -> list[dict[str, int]]:
    return [{"id": number} for number in range(first, last)]


def write(path: Path, first: int, last: int, row_group_size: int = 4, **options: Any) -> None:
    pq.write_table(pa.table({"id": list(range(first, last))}), path, row_group_size=row_group_size, **options)


def test_rows_marks_and_places(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    write(path, 0, 10)
    source = open_table_source("parquet", path)
    assert (source.name, source.live, source.blank, source.start) == (str(path), False, 0, (0, 0))
    rows = read_rows(source)
    assert [row.value for row in rows] == ids(0, 10)
    assert [row.position for row in rows] == [(0, number) for number in range(1, 11)]
    assert [row.place for row in rows] == [(str(path), number, None) for number in range(1, 11)]
    assert source.progress == (path.stat().st_size, path.stat().st_size)
    assert source.read() is None
    source.close()
    source.close()


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_going_on_after_any_row_gives_the_rest(tmp_path: Path, kind: str) -> None:
    for number, (first, last) in enumerate([(0, 7), (7, 7), (7, 20)]):
        write(tmp_path / f"{number}.parquet", first, last)
        table = pa.table({"id": list(range(first, last))}, pa.schema([("id", pa.int64())]))
        with (
            pa.OSFile(str(tmp_path / f"{number}.arrow"), "wb") as file,
            pa.ipc.new_stream(file, table.schema) as stream,
        ):
            stream.write_table(table, max_chunksize=3)
    source = open_table_source(kind, tmp_path)
    positions = [source.entry(source.start)]
    while (piece := source.read()) is not None:
        positions += [source.entry(piece.position(index)) for index in range(len(piece.lines))]
    # Marks may lie behind what was read: a later run gives them again.
    assert source.entry(source.start) == positions[0]
    source.close()
    assert len(positions) == 21
    for taken, position in enumerate(positions):
        again = open_table_source(kind, tmp_path, position)
        assert again.entry(again.start) == position
        assert values(again) == ids(taken, 20)


def test_a_directory_is_read_by_name(tmp_path: Path) -> None:
    for number, name in enumerate(["b.parquet", "a.parquet", "_metadata.parquet", ".c.parquet", "d.txt", "B.parquet"]):
        write(tmp_path / name, number, number + 1)
    (tmp_path / "e.parquet").mkdir()
    assert values(open_table_source("parquet", tmp_path)) == [{"id": 5}, {"id": 1}, {"id": 0}]


def test_files_with_other_columns_keep_their_own(tmp_path: Path) -> None:
    pq.write_table(pa.table({"x": [1]}), tmp_path / "1.parquet")
    pq.write_table(pa.table({"y": ["2"], "x": [None]}), tmp_path / "2.parquet")
    assert values(open_table_source("parquet", tmp_path)) == [{"x": 1}, {"y": "2", "x": None}]


def test_an_image_is_base64(tmp_path: Path) -> None:
    rows = [{"image": {"bytes": b"\x89PNG", "path": "a.png"}}, {"image": None}]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    expected = [{"image": {"bytes": "iVBORw==", "path": "a.png"}}, {"image": None}]
    assert values(open_table_source("parquet", tmp_path / "a.parquet")) == expected


def test_refused_rows_keep_their_places(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"id": [0, 1, 2], "price": [None, decimal.Decimal("1.5"), None]}), path)
    source = open_table_source("parquet", path)
    rows = read_rows(source)
    assert [row.value for row in rows[::2]] == [{"id": 0, "price": None}, {"id": 2, "price": None}]
    assert rows[1].value.startswith("refused: column 'price': a value of type decimal128(2, 1), a decimal")
    assert rows[1].place == (str(path), 2, None)
    source.close()


def test_large_rows_come_in_small_pieces(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    table = pa.table({"text": [chr(97 + n % 26) * 100_000 for n in range(64)]})
    pq.write_table(table, path, use_dictionary=False)
    source = open_table_source("parquet", path)
    pieces = []
    while (piece := source.read()) is not None:
        pieces.append(sum(len(line) for line in piece.lines if isinstance(line, bytes)))
    source.close()
    assert len(pieces) >= 6
    assert max(pieces) <= 2 << 20


def test_restarting_passes_over_row_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.parquet"
    write(path, 0, 100, row_group_size=10)
    source = open_table_source("parquet", path)
    position = source.entry(read_rows(source)[84].position)
    source.close()
    groups: list[int] = []
    iter_batches = pq.ParquetFile.iter_batches

    def listen(self: Any, *, row_groups: list[int], **options: Any) -> Any:
        groups.extend(row_groups)
        return iter_batches(self, row_groups=row_groups, **options)

    monkeypatch.setattr(pq.ParquetFile, "iter_batches", listen)
    assert values(open_table_source("parquet", path, position)) == ids(85, 100)
    assert groups == [8, 9]


@pytest.mark.parametrize(
    ("content", "match"),
    [
        (b"", "expected a Parquet file, found something else, which begins with b''"),
        (b'{"id":1}\n', "expected a Parquet file, found something else"),
        (b"PAR1" + b"x" * 100, "expected a complete Parquet file, found one of 104 bytes without its end; is it still"),
        (b"PAR1PAR1", "expected a complete Parquet file, found one of 8 bytes"),
        (b"PARE" + b"x" * 100 + b"PARE", "encrypted"),
        (b"PAR1" + b"x" * 100 + b"\xff\xff\0\0PAR1", "expected a Parquet file that can be read, found"),
    ],
)
def test_no_parquet(tmp_path: Path, content: bytes, match: str) -> None:
    path = tmp_path / "a.parquet"
    path.write_bytes(content)
    with pytest.raises(SourceRefused, match=match) as error:
        open_table_source("parquet", path)
    assert error.value.file == str(path)


def test_a_damaged_page(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    write(path, 0, 1000, row_group_size=1000, compression="zstd", use_dictionary=False)
    data = bytearray(path.read_bytes())
    data[40:200] = b"\xaa" * 160
    path.write_bytes(data)
    source = open_table_source("parquet", path)
    with pytest.raises(SourceRefused, match=r"a\.parquet: expected a Parquet file that can be read, found"):
        read_rows(source)
    source.close()


def test_two_columns_of_one_name(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table([[1], [2]], names=["x", "x"]), path)
    with pytest.raises(SourceRefused, match="expected every column under a name of its own, found two columns named"):
        open_table_source("parquet", path)
