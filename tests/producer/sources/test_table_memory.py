"""What a source of tables takes of memory, in a process of its own."""

import subprocess
import sys
from pathlib import Path
from typing import Any, Final

import pytest

from tests.harness.processes.environment import environment

pa = pytest.importorskip("pyarrow", reason="needs pyarrow: pip install 'lazyshard[arrow]'")
pq = pytest.importorskip("pyarrow.parquet")

MIB: Final = 1 << 20
ROWS: Final = 160 * 1024
ROW_BYTES: Final = 1024

CHILD: Final = """
import pathlib, sys
from tests.producer.sources.table_sources import open_table_source

def read(path):
    source = open_table_source(sys.argv[1], pathlib.Path(path))
    rows = 0
    while (piece := source.read()) is not None:
        rows += len(piece.lines)
    source.close()
    return rows

def peak():
    # Not ru_maxrss: that begins with what the parent took.
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))

small = read(sys.argv[2])
before = peak()
print(small, read(sys.argv[3]), peak() - before)
"""


def write(kind: str, path: Path, rows: int) -> None:
    """One row group, or one record batch, of rows that do not compress or repeat."""
    text = pa.array([f"{number:0{ROW_BYTES}d}" for number in range(rows)])
    table = pa.table({"text": text}).combine_chunks()
    if kind == "parquet":
        pq.write_table(table, path, row_group_size=rows, compression="none", use_dictionary=False)
    else:
        sink = pa.OSFile(str(path), "wb")
        with sink, pa.ipc.new_stream(sink, table.schema) as stream:
            stream.write_table(table)


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_one_row_group_or_batch_of_160_mib_is_not_held_whole(tmp_path: Path, kind: str) -> None:
    # The small one brings what does not depend on the size: pyarrow's own state, and its buffers.
    write(kind, tmp_path / "small", 4096)
    write(kind, tmp_path / "large", ROWS)
    command: list[Any] = [sys.executable, "-c", CHILD, kind, tmp_path / "small", tmp_path / "large"]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    small, large, growth_kib = map(int, done.stdout.split())
    assert (small, large) == (4096, ROWS)
    assert growth_kib * 1024 < 48 * MIB
