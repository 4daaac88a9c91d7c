"""A minute of the soak holds, and it finds what is planted: a leak, an early acknowledgement, a lost sample."""

import socket
from pathlib import Path

import numpy as np
import pytest

from lazyshard import ChunkWriter
from tests.harness.planted.soak import MUTANTS
from tests.harness.processes.nursery import Nursery
from tests.harness.soak.job import END, Rules, Shape, train
from tests.harness.soak.rows import row
from tests.harness.soak.run import soak

LOADED = ("tests.harness.soak.run",)  # By the process that is forked
pytestmark = pytest.mark.timeout(600)  # Of a busy machine; what hangs in a soak it tells itself


@pytest.mark.full
def test_a_short_soak_loses_and_leaks_nothing(forks: Nursery, tmp_path: Path) -> None:
    found = soak(forks, tmp_path, "--minutes", "0.4", "--ranks", "4")
    assert found is not None
    assert found["violations"] == []
    assert found["done"]["steps"] > 0
    assert found["kills"] > 0
    assert found["counts"]["lives of processes long enough to be compared"] > 0
    samples = found["counts"]["samples of the stream"]
    assert 0 <= samples - found["counts"]["samples that the surviving history has trained"] < 4 * 32


@pytest.mark.full
@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_soak_finds_a_mistake(mutant: str, forks: Nursery, tmp_path: Path) -> None:
    found = soak(forks, tmp_path, "--minutes", "3", "--ranks", "2", "--mutant", mutant)
    assert found is not None
    assert found["violations"], found
    assert found["violations"][0].split(":")[0] in MUTANTS[mutant].kinds, found["violations"]


def test_a_life_may_begin_when_the_stream_has_ended(tmp_path: Path) -> None:
    with ChunkWriter(tmp_path / "s", samples_per_chunk=4) as writer:
        for sample in range(10):
            writer.write(row(sample))
    (tmp_path / "checkpoints").mkdir()
    ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, its:
        for _ in range(6):
            ours.send(b"continue")
        train(Rules(4, 4, 0), Shape(0, 1, 2, 0), 0, tmp_path / "s", tmp_path / "checkpoints", None, its)
        steps = [np.frombuffer(ours.recv(1 << 16)[1:], dtype=np.int64).tolist() for _ in range(5)]
        assert ours.recv(1 << 16) == END
    assert steps == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9]]
