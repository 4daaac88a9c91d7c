"""What a rank does by itself: it trains with its network cut, and what it puts for bad samples survives kills."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

import pytest

from lazyshard import ChunkWriter

CUT: Final = shutil.which("unshare")
CAN_CUT: Final = CUT is not None and subprocess.run([CUT, "--net", "--map-root-user", "true"]).returncode == 0

pytestmark = pytest.mark.full

TRAIN: Final = '''
"""train.py STREAM OUT RANK RANKS WORKERS KILL_AT: prints the ids of each micro batch; dies at that step."""
import json, os, pathlib, signal, sys
from lazyshard import LazyShardedDataset, Order

stream, out, (rank, ranks, workers, kill_at) = sys.argv[1], pathlib.Path(sys.argv[2]), map(int, sys.argv[3:])

def encode(row):
    if row["id"] % 7 == 3:
        raise ValueError("too long")
    return row["id"]

dataset = LazyShardedDataset(stream, encode, dp_rank=rank, dp_size=ranks, batch_size=4, order=Order(shuffle_window=2))
batches = dataset.batches(num_workers=workers, collate_fn=list)
saved = out / "state.json"
if saved.exists():
    batches.load_state_dict(json.loads(saved.read_text()))
for batch in batches:
    with (out / f"trained-{rank}.jsonl").open("a") as file:
        print(json.dumps([batches.step, batch]), file=file)
    if rank == 0 and batches.step % 3 == 0:
        (out / "new").write_text(json.dumps(batches.state_dict()))
        (out / "new").rename(saved)
    if batches.step == kill_at:
        os.kill(os.getpid(), signal.SIGKILL)
'''

CONNECT: Final = """
import socket, sys
try:
    socket.create_connection(("127.0.0.1", int(sys.argv[1])), timeout=5)
except OSError:
    sys.exit(7)
"""


def publish(stream: Path, samples: int) -> None:
    with ChunkWriter(stream, 10) as writer:
        for number in range(samples):
            writer.write({"id": number})


def train(folder: Path, out: str, *numbers: int, before: tuple[str, ...] = ()) -> int:
    """Runs the program; returns its exit code."""
    (folder / out).mkdir(exist_ok=True)
    arguments = ["-c", TRAIN, str(folder / "stream"), str(folder / out), *map(str, numbers)]
    return subprocess.run([*before, sys.executable, *arguments], timeout=100).returncode


def trained(folder: Path, rank: int = 0) -> list[list[Any]]:
    """Returns step and ids of each micro batch, in the order in which they were trained."""
    lines = (folder / f"trained-{rank}.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


@pytest.mark.skipif(not CAN_CUT, reason="needs unshare, and leave to make a network namespace")
def test_ranks_whose_network_is_cut_train_each_sample_once(tmp_path: Path) -> None:
    assert CUT is not None
    cut = (CUT, "--net", "--map-root-user")
    with socket.create_server(("127.0.0.1", 0)) as server:
        connect = [sys.executable, "-c", CONNECT, str(server.getsockname()[1])]
        assert [subprocess.run([*before, *connect]).returncode for before in ((), cut)] == [0, 7]
    publish(tmp_path / "stream", 120)
    for rank in range(3):
        assert train(tmp_path, f"rank{rank}", rank, 3, rank, 0, before=cut) == 0
    good = [number for number in range(120) if number % 7 != 3]
    ids = [number for rank in range(3) for _, batch in trained(tmp_path / f"rank{rank}", rank) for number in batch]
    assert sorted(set(ids)) == good
    assert len(ids) == 120


def test_substitutes_are_the_same_after_kills_as_without(tmp_path: Path) -> None:
    publish(tmp_path / "stream", 200)
    assert train(tmp_path, "whole", 0, 1, 0, 0) == 0
    whole = trained(tmp_path / "whole")
    ids = [number for _, batch in whole for number in batch]
    assert len(ids) == 200 and not [number for number in ids if number % 7 == 3]
    for workers, kill_at in ((2, 4), (0, 11), (1, 31), (2, 35)):
        assert train(tmp_path, "killed", 0, 1, workers, kill_at) == -9
    assert train(tmp_path, "killed", 0, 1, 2, 0) == 0
    again = trained(tmp_path / "killed")
    # Steps that a checkpoint did not have are trained again, by the same samples.
    assert [step for step, _ in again] == [*range(1, 5), *range(4, 12), *range(10, 32), *range(31, 36), *range(34, 51)]
    assert all([step, batch] in whole for step, batch in again)
