"""`kill -9` at points that were waited for and at random ones: every row once, in order, in the same chunks."""

import random
import signal
from pathlib import Path

import pytest

from lazyshard_producer.cli import main
from tests.harness.processes.producing import (
    chunk_files,
    ids,
    killed_at_random,
    published,
    rows,
    run,
    run_arguments,
    start,
    wait_until,
)

pytestmark = pytest.mark.full

ROWS = 4000
PER_CHUNK = 37


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("sources")
    (folder / "a").write_bytes(b"\xef\xbb\xbf" + rows(0, 1501)[:-1])
    (folder / "b").write_bytes(b"\n")
    (folder / "c").write_bytes(rows(1501, ROWS).replace(b"\n", b"\r\n\r\n"))
    return [folder / "a", folder / "b", folder / "c"]


@pytest.fixture(scope="module")
def uninterrupted(sources: list[Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    out = tmp_path_factory.mktemp("uninterrupted") / "out"
    assert main(run_arguments(out, sources, PER_CHUNK)) == 0
    assert ids(out) == list(range(ROWS))
    return chunk_files(out)


def assert_whole(out: Path, uninterrupted: dict[str, bytes]) -> None:
    assert ids(out) == list(range(ROWS))
    assert chunk_files(out) == uninterrupted
    assert not (out / ".tmp").exists()


def test_killed_after_chunks_that_were_waited_for(
    sources: list[Path], uninterrupted: dict[str, bytes], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    arguments = run_arguments(out, sources, PER_CHUNK, "--rate", 4000)
    for chunks in (1, 3, 39, 41, 42, 80):
        process = start(*arguments)
        wait_until(lambda chunks=chunks: published(out) >= chunks, process)  # type: ignore[misc]
        process.kill()
        process.communicate()
        assert process.returncode == -signal.SIGKILL
        done = ids(out)
        assert done == list(range(len(done)))
        assert len(done) >= chunks * PER_CHUNK
    assert run(*run_arguments(out, sources, PER_CHUNK)).returncode == 0
    assert_whole(out, uninterrupted)


@pytest.mark.parametrize("seed", range(2))
def test_killed_at_random(seed: int, sources: list[Path], uninterrupted: dict[str, bytes], tmp_path: Path) -> None:
    out = tmp_path / "out"
    dice = random.Random(seed)
    arguments = run_arguments(out, sources, PER_CHUNK)
    for _ in killed_at_random(arguments, out, dice, 12):
        done = ids(out)
        assert done == list(range(len(done)))
    assert_whole(out, uninterrupted)
