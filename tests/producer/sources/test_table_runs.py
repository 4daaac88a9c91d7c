"""The whole command on tables and Python functions: killed, stopped, refused, gone on with."""

import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest

from tests.harness.processes.producing import (
    assert_one_line,
    chunk_files,
    ids,
    published,
    run,
    run_arguments,
    start,
    wait_until,
)

pytestmark = pytest.mark.full

pa = pytest.importorskip("pyarrow", reason="needs pyarrow: pip install 'lazyshard[arrow]'")
pq = pytest.importorskip("pyarrow.parquet")

ROWS: Final = 2000
PER_CHUNK: Final = 37

COUNTING: Final = f"""
def rows(position):
    for number in range(position or 0, {ROWS}):
        yield {{"id": number}}, number + 1
"""

BLOCKING: Final = """
import threading

def rows(position):
    for number in range(position or 0, 25):
        yield {"id": number}, number + 1
    threading.Event().wait()
"""


def table(first: int, last: int) -> Any:
    return pa.table({"id": list(range(first, last)), "at": pa.array(range(first, last), pa.timestamp("us"))})


def parquet_files(folder: Path) -> str:
    for first in range(0, ROWS, 500):
        pq.write_table(table(first, first + 500), folder / f"{first:04d}.parquet", row_group_size=90)
    return str(folder)


def arrow_file(folder: Path) -> str:
    with pa.OSFile(str(folder / "a.arrow"), "wb") as sink, pa.ipc.new_stream(sink, table(0, 1).schema) as stream:
        stream.write_table(table(0, ROWS), max_chunksize=90)
    return str(folder / "a.arrow")


def hugging_face(folder: Path) -> str:
    arrow_file(folder)
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": "a.arrow"}]}))
    return str(folder)


def function(folder: Path) -> str:
    (folder / "counting.py").write_text(COUNTING)
    return "python:counting:rows"


@pytest.mark.parametrize("make", [parquet_files, arrow_file, hugging_face, function])
def test_killed_after_chunks_that_were_waited_for(tmp_path: Path, make: Callable[[Path], str]) -> None:
    folder = tmp_path / "source"
    folder.mkdir()
    arguments = run_arguments(tmp_path / "out", [], PER_CHUNK, "--source", make(folder))
    for chunks in (1, 14, 40):
        process = start(*arguments, "--rate", 4000, cwd=folder)
        wait_until(lambda chunks=chunks: published(tmp_path / "out") >= chunks, process)  # type: ignore[misc]
        process.kill()
        process.communicate()
        done = ids(tmp_path / "out")
        assert done == list(range(len(done)))
    assert run(*arguments, cwd=folder).returncode == 0
    whole = run_arguments(tmp_path / "whole", [], PER_CHUNK, "--source", make(folder))
    assert run(*whole, cwd=folder).returncode == 0
    assert ids(tmp_path / "out") == list(range(ROWS))
    assert chunk_files(tmp_path / "out") == chunk_files(tmp_path / "whole")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_a_signal_while_the_function_blocks(tmp_path: Path, number: signal.Signals, code: int) -> None:
    (tmp_path / "blocking.py").write_text(BLOCKING)
    arguments = run_arguments(tmp_path / "out", [], 10, "--source", "python:blocking:rows")
    with start(*arguments, cwd=tmp_path) as process:
        wait_until(lambda: published(tmp_path / "out") == 2, process)
        process.send_signal(number)
        _, err = process.communicate(timeout=60)
    assert process.returncode == code, err
    assert ids(tmp_path / "out") == list(range(20))
    # The rows of the unfinished chunk are asked for again.
    (tmp_path / "blocking.py").write_text(BLOCKING.replace("    threading.Event().wait()\n", ""))
    assert run(*arguments, cwd=tmp_path).returncode == 0
    assert ids(tmp_path / "out") == list(range(25))


def test_a_function_that_raises_is_mended_and_gone_on_with(tmp_path: Path) -> None:
    (tmp_path / "counting.py").write_text(
        COUNTING.replace("        yield", "        number == 95 and 1 / 0\n        yield")
    )
    arguments = run_arguments(tmp_path / "out", [], PER_CHUNK, "--source", "python:counting:rows")
    done = run(*arguments, cwd=tmp_path)
    assert done.returncode == 4
    assert_one_line(done.stderr, "python:counting:rows: raised ZeroDivisionError", "at counting.py:4 (rows)")
    assert ids(tmp_path / "out") == list(range(2 * PER_CHUNK))
    (tmp_path / "counting.py").write_text(COUNTING)
    assert run(*arguments, cwd=tmp_path).returncode == 0
    assert ids(tmp_path / "out") == list(range(ROWS))


def test_a_row_that_json_cannot_hold(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"id": list(range(9)), "x": [float("nan") if n == 5 else None for n in range(9)]}), path)
    done = run(*run_arguments(tmp_path / "out", [path], 2))
    assert done.returncode == 3
    assert_one_line(done.stderr, f"{path}:6: column 'x': NaN, which JSON does not have")
    assert run(*run_arguments(tmp_path / "out", [path], 2, "--on-bad-row", "skip")).returncode == 0
    assert ids(tmp_path / "out") == [0, 1, 2, 3, 4, 6, 7, 8]


def test_a_published_file_that_was_replaced(tmp_path: Path) -> None:
    parquet_files(tmp_path)
    arguments = run_arguments(tmp_path / "out", [tmp_path], PER_CHUNK)
    process = start(*arguments, "--rate", 4000)
    wait_until(lambda: published(tmp_path / "out") >= 20, process)
    process.kill()
    process.communicate()
    pq.write_table(table(0, 499), tmp_path / "0000.parquet")
    done = run(*arguments)
    assert done.returncode == 4
    assert_one_line(
        done.stderr, f"{tmp_path / '0000.parquet'}: expected the file whose rows were read, found another one"
    )
