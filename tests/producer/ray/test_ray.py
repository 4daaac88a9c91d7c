"""The sink with a real Ray: one cluster on this machine, in processes of its own."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import pytest

from tests.harness.processes.environment import ROOT, environment
from tests.harness.processes.producing import chunk_files, ids, published, wait_until

pytest.importorskip("ray", reason="needs Ray Data: pip install 'lazyshard[ray]'")
pytest.importorskip("pandas", reason="needs Ray Data: pip install 'lazyshard[ray]'")

# Starting Ray takes many seconds, and each worker that dies some more.
pytestmark = [pytest.mark.full, pytest.mark.timeout(600)]
TIMEOUT_S: Final = 500.0
SCENARIOS: Final = (
    *("killed_driver", "killed_driver_with_a_key", "killed_workers", "finished_out_of_order", "in_any_order"),
    *("refused_and_mended", "nothing", "used_twice", "tensors", "pandas_and_bytes", "python_objects"),
)


@pytest.fixture(scope="module")
def temporary() -> Iterator[str]:
    """A short path: names of sockets have about a hundred characters at the most."""
    with tempfile.TemporaryDirectory(prefix="ray", ignore_cleanup_errors=True) as path:
        yield path


def start(directory: Path, temporary: str, scenarios: Sequence[str]) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "tests.producer.ray.ray_driver", str(directory), temporary, *scenarios]
    variables = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled", "PYTHONUNBUFFERED": "1"}
    with (directory / "errors").open("a") as errors:
        env = environment() | variables
        return subprocess.Popen(command, env=env, cwd=ROOT, stdout=subprocess.PIPE, stderr=errors, text=True)


def finish(process: "subprocess.Popen[str]", directory: Path) -> dict[str, Any]:
    out, _ = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 0, (directory / "errors").read_text()[-5000:]
    return {name: said for line in out.splitlines() if line[:1] == "{" for name, said in json.loads(line).items()}


def durable(out: Path) -> set[int]:
    """The keys of all complete pieces; a folder that is written has a hidden name, and pieces move as they are read."""
    while True:
        try:
            records = [*out.glob(".ray/*/[!.]*/piece.json"), *out.glob(".ray/keys/*")]
            return {key for path in records for key in json.loads(path.read_bytes())["keys"]}
        except FileNotFoundError:
            pass


class Streams(NamedTuple):
    """Streams that two drivers have made: the first was killed in the middle of one, the second has made all."""

    directory: Path
    said: dict[str, Any]  # by the second
    ids: list[int]  # what the first had written by then, and the chunks of it
    chunks: dict[str, bytes]
    published: int
    durable: set[int]  # by a first driver with a key that was killed


def kill_when(directory: Path, temporary: str, scenario: str, condition: Callable[[], bool]) -> None:
    with start(directory, temporary, [scenario]) as process:
        wait_until(condition, process)
        process.kill()


@pytest.fixture(scope="module")
def streams(tmp_path_factory: pytest.TempPathFactory, temporary: str) -> Streams:
    directory = tmp_path_factory.mktemp("ray")
    out = directory / "killed_driver"
    kill_when(directory, temporary, "killed_driver", lambda: published(out) >= 4)
    keyed = directory / "killed_driver_with_a_key"
    kill_when(directory, temporary, "killed_driver_with_a_key", lambda: len(durable(keyed)) >= 24)
    kept = durable(keyed)
    found, chunks, told = ids(out), chunk_files(out), published(out)
    assert not (out / "stream.end").exists()
    for one in (out, keyed):
        one.with_suffix(".go").touch()
    with start(directory, temporary, SCENARIOS) as process:
        return Streams(directory, finish(process, directory), found, chunks, told, kept)


def rows(out: Path) -> list[Any]:
    return [json.loads(line) for _, data in sorted(chunk_files(out).items()) for line in data.splitlines()]


def assert_ended(out: Path, expected: range) -> None:
    assert ids(out) == list(expected)
    assert (out / "stream.end").exists()
    assert not (out / ".ray").exists()
    assert not (out / ".tmp").exists()


def test_rows_come_once_each_when_workers_die_before_and_after_they_have_written(streams: Streams) -> None:
    assert sorted(os.listdir(streams.directory / "killed_workers.flags")) == ["1", "2"]
    assert_ended(streams.directory / "killed_workers", range(60))


def test_the_order_is_that_of_the_blocks_whichever_is_finished_first_unless_there_is_none(streams: Streams) -> None:
    assert (streams.directory / "finished_out_of_order.died").exists()
    assert_ended(streams.directory / "finished_out_of_order", range(40))
    assert sorted(ids(streams.directory / "in_any_order")) == list(range(40))
    assert "set execution_options.preserve_order = True" in (streams.directory / "errors").read_text()


def test_a_refused_row_is_named_and_what_was_published_while_its_task_still_ran_stays(streams: Streams) -> None:
    # The last task has waited for the first chunk.
    _, refused, state = streams.said["refused_and_mended"]
    assert state == "failed"
    assert "task 3, row 8: column 'x': NaN" in refused
    assert_ended(streams.directory / "refused_and_mended", range(40))
    found = [row["x"] for row in rows(streams.directory / "refused_and_mended")[36:39]]
    assert found == [1.0, 0.0, 1.0]


def test_a_sink_is_for_one_write_also_of_no_rows_and_a_stream_that_has_ended_for_none(streams: Streams) -> None:
    assert streams.said["used_twice"] == ["RuntimeError", "StreamEnded"]
    for name, rows in (("used_twice", 3), ("nothing", 0)):
        assert_ended(streams.directory / name, range(rows))


def test_what_columns_become(streams: Streams) -> None:
    assert rows(streams.directory / "tensors") == [
        {"id": 1, "v": [[0.0, 0.0]], "data": [[0, 1], [2, 3]]},
        {"id": 2, "v": [[0.0, 0.0], [0.0, 0.0]], "data": [[4, 5], [6, 7]]},
    ]
    (row,) = rows(streams.directory / "pandas_and_bytes")
    assert row.pop("at").startswith("2026-01-02T00:00:00")
    assert row == {"image": "iVBORw==", "tags": [1, 2]}
    assert "task 0, row 1: column 'v': Python objects" in streams.said["python_objects"][1]


def test_a_driver_that_was_killed_is_gone_on_with(streams: Streams) -> None:
    # The kill may have come between a seal and the head that tells of it.
    assert len(streams.ids) - 5 * streams.published in (0, 5)
    assert streams.ids == list(range(len(streams.ids)))
    out = streams.directory / "killed_driver"
    assert streams.chunks.items() <= chunk_files(out).items()
    assert_ended(out, range(40))


def test_with_a_key_a_driver_that_was_killed_computes_only_what_was_not_durable(streams: Streams) -> None:
    out = streams.directory / "killed_driver_with_a_key"
    assert streams.durable == set(range(24))
    assert streams.said["killed_driver_with_a_key"] == list(range(24, 40))
    assert sorted(ids(out)) == list(range(40))
    assert (out / "stream.end").exists()
    assert not (out / ".ray").exists()
