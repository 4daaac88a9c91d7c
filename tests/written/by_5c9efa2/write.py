"""Writes the fixture in this folder by the code of commit 5c9efa2. `tests/written/test_written.py` reads it.

::

    git worktree add OLD 5c9efa2
    cd OLD && PYTHONPATH=.:producer:integrations/swift python .../tests/written/by_5c9efa2/write.py NEW_FOLDER

It is run in NEW_FOLDER, so that all paths in the files are relative. Host, boot and process namespace are made up.
Another run gives the same rows and orders, with other identities, times and process numbers.
"""

import gzip
import json
import os
import shutil
import signal
import socket
import sys
import time
from itertools import chain, islice, product
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import xxhash
from lazyshard.storage import producer_process
from tests.storage.lengths import measured

import lazyshard
from lazyshard_producer.cli import main as produce
from lazyshard_swift.checkpoints import Checkpoints, let_go_of_cursors
from lazyshard_swift.opening import open_train_stream
from tests.swift.unit.runs import megatron

socket.gethostname = lambda: "node1"
producer_process._place = lambda: "00000000-0000-4000-8000-000000000000 4026531836"

EXPECTED = {"orders": {}, "states": {}, "producers": {}}
ROWS = [{"id": number, "text": f"row {number} ü\u2028"} for number in range(1100)]
TOKENS = [{"id": n, "input_ids": [100 * n + place for place in range(n * 7 % 9 + 1)]} for n in range(24)]


def put(path, data=b""):
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_bytes(data if isinstance(data, bytes) else json.dumps(data, indent=0).encode())


def lines(rows):
    return b"".join(json.dumps(row, ensure_ascii=False).encode() + b"\n" for row in rows)


def streams():
    def stream(name, rows, per_chunk, end=True, **options):
        writer = lazyshard.ChunkWriter(f"streams/{name}", per_chunk, **options)
        for row in rows:
            writer.write(row, tokens=len(row["input_ids"]) if "input_ids" in row else None)
        writer.close(end=end)

    stream("ended", ROWS[:54], 4)
    stream("other", ROWS[1000:1020], 3)
    stream("open", ROWS[:14], 4, end=False)
    stream("lengths", TOKENS[:20], 3)
    stream("measured", ROWS[:4], 2, end=False)
    measured(Path("streams/measured"), [5, 7], [0, 9], measure="by hand")
    arrays = [{"input_ids": np.array(row["input_ids"], np.int32)} for row in TOKENS[:10]]
    for n, row in enumerate(arrays):
        row["more"] = [np.full((2, n), n / 2, np.float16), {"mask": np.array(n % 2 == 0)}]
        row["half"] = np.array([0x3F80, n], np.uint16).view(lazyshard.BFLOAT16)
    stream("arrays", arrays, 4, arrays=True, encoding={"encoder": "by hand", "max_length": 9})
    for number, rows in enumerate((ROWS[:4], ROWS[4:8], [])):
        put(f"streams/foreign/chunk_{number:05d}.jsonl", lines(rows) + b'{"id":8}' * (number == 2))
        put(f"streams/foreign/chunk_{number:05d}.jsonl.completed")
    put("streams/foreign/stream.end")
    run = lazyshard.LazyShardedDataset("streams/foreign", dp_rank=0, dp_size=1, samples_per_chunk=4, consumer="run")
    batches = run.batches(collate_fn=list)
    taken = [batch[0]["id"] for batch in islice(batches, 5)]
    batches.commit()
    keep("foreign", batches.state_dict(), taken, [[5, 6, 7, 8]])


def started(chunks, command):
    """Runs a producer in a child until so many chunks are published, and it waits."""
    if (child := os.fork()) == 0:
        os._exit(produce(command))
    deadline = time.monotonic() + 20
    while not Path("out/head.json").exists() or json.loads(Path("out/head.json").read_bytes())["chunks"] < chunks:
        assert time.monotonic() < deadline or os.kill(child, signal.SIGKILL)
        time.sleep(0.01)
    time.sleep(1.0)
    return child


def stopped(name, chunks, how, command, sources):
    """Stops a producer in producers/NAME once it is held back, and runs one like it elsewhere to the end.

    What is in later/ comes into the followed directory inbox/ only then.
    """
    for path, data in sources.items():
        put(f"producers/{name}/{path}", data)
    command = f"run {command} --out out --samples-per-chunk 4 --no-progress"
    shutil.copytree(f"producers/{name}", f"whole/{name}")
    os.chdir(f"producers/{name}")
    child = started(chunks, [*command.split(), "--max-ahead", f"{chunks}chunks"])
    os.kill(child, how)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == (-how if how == signal.SIGKILL else 0)
    os.chdir(f"../../whole/{name}")
    if "later/_END" in sources:
        shutil.copytree("later", "inbox", dirs_exist_ok=True)
    assert produce(command.split()) == 0
    reader = lazyshard.StreamReader("out")
    rows = [reader.read(sample) for sample in range(reader.refresh().samples)]
    EXPECTED["producers"][name] = {"command": command, "rows": rows}
    os.chdir("../..")


def table(rows):
    buffer = pa.BufferOutputStream()
    pq.write_table(pa.Table.from_pylist(rows), buffer, row_group_size=4)
    return buffer.getvalue().to_pybytes()


def producers():
    term, kill = signal.SIGTERM, signal.SIGKILL
    some = {"a.jsonl": lines(ROWS[:30])}
    stopped("text", 3, kill, "--source a.jsonl", some)
    stopped("gzip", 3, term, "--source a.jsonl.gz", {"a.jsonl.gz": gzip.compress(some["a.jsonl"], mtime=0)})
    files = {"a.jsonl": lines(ROWS[:6]), "b.jsonl.gz": gzip.compress(lines(ROWS[6:11]), mtime=0)}
    files |= {"table/0.parquet": table(ROWS[11:20]), "table/1.parquet": table(ROWS[20:30])}
    stopped("files", 4, term, "--source a.jsonl --source b.jsonl.gz --source table", files)
    inbox = [lines(ROWS[first : first + 10]) for first in (0, 10, 20, 30)]
    files = {"inbox/0.jsonl": inbox[0], "inbox/1.jsonl": inbox[1], "inbox/2.jsonl": inbox[2], "later/3.jsonl": inbox[3]}
    stopped("follow", 3, kill, "--follow inbox --finished-by rename", files | {"later/_END": b""})
    files = {"a.jsonl": lines(ROWS[100:120]), "b.parquet": table(ROWS[200:220]), "later/_END": b""}
    files |= {"inbox/0.jsonl": inbox[0], "later/1.jsonl": inbox[1]}
    mixed = "--source a.jsonl --weight 2 --source b.parquet --weight 1 --follow inbox --weight 1 --finished-by rename"
    stopped("mixed", 4, term, mixed, files)
    bad = lines(ROWS[:7]) + b'{"id": 7\n' + lines(ROWS[8:28]) + b"[]\n" + lines(ROWS[29:30])
    stopped("shuffled", 4, term, "--source a.jsonl --on-bad-row quarantine --shuffle 6 --seed 3", {"a.jsonl": bad})
    lengths = {"a.jsonl": lines([{"id": number, "length": number * 5 % 9 + 1} for number in range(40)])}
    stopped("packs", 3, term, "--source a.jsonl --pack 12 --pack-buffer 10", lengths)
    stopped("balance", 3, term, "--source a.jsonl --balance 2 --micro-batch-size 2", lengths)
    stopped("split", 3, term, "--source a.jsonl --split 5 --split-eos 2", {"a.jsonl": lines(TOKENS)})


def retained():
    """A producer that deletes what its consumer has trained, chunks 0 to 2, stopped after that."""
    put("producers/retained/a.jsonl", lines(ROWS[:60]))
    os.chdir("producers/retained")
    command = "run --source a.jsonl --out out --samples-per-chunk 4 --no-progress --retain consumed"
    for chunks in (6, 9):
        child = started(chunks, [*command.split(), "--max-ahead", "6chunks"])
        os.kill(child, signal.SIGTERM)
        os.waitpid(child, 0)
        if chunks == 6:
            run = lazyshard.LazyShardedDataset("out", dp_rank=0, dp_size=1, consumer="run", max_total_samples=60)
            batches = run.batches(collate_fn=list)
            run.commit(0, last_epoch=True)
            taken = [row["id"] for batch in islice(batches, 14) for row in batch]
            run.commit(14, last_epoch=True)
    os.chdir("../..")
    EXPECTED["producers"]["retained"] = {"command": command, "rows": ROWS[:60]}
    keep("retained", batches.state_dict(), taken, [list(range(14, 60))])


def keep(name, state, trained, left):
    """Keeps a state, what was trained before it, and what each rank draws after it."""
    put(f"states/{name}.json", state)
    EXPECTED["states"][name] = {"trained": trained, "left": left}


def ended(rank, dp, **options):
    given = {"batch_size": 2, "shuffle_window": 1, "seed": 5, **options}
    return lazyshard.LazyShardedDataset("streams/ended", dp_rank=rank, dp_size=dp, **given)


def blend(rank, dp):
    other = lazyshard.LazyShardedDataset("streams/other", dp_rank=rank, dp_size=dp, shuffle_window=1)
    return lazyshard.BlendedDataset([(ended(rank, dp, batch_size=1), 3), (other, 1)], batch_size=2)


def packs(rank, dp):
    return lazyshard.LazyShardedSequences(
        "streams/lengths", form=lazyshard.Pack(12), window=3, seed=3, dp_rank=rank, dp_size=dp
    )


def drawn(make, dp, state=None, epoch=None, **options):
    """What each rank draws, from a state or from the beginning of an epoch."""
    runs = [make(rank, dp, **options) for rank in range(dp)]
    for run in runs:
        if state is not None:
            run.load_state_dict(state)
        if epoch is not None:
            run.set_epoch(epoch)
    if make is packs:
        return [[[row["id"] for row in pack] for pack in run] for run in runs]
    return [[run[index]["id"] for index in run.rank_indices] for run in runs]


def states():
    for dp, epoch, unit, window in product((1, 2, 4), (0, 1), ("chunk", "batch"), (0, 1, 8, 14)):
        order = drawn(ended, dp, epoch=epoch, unit=unit, shuffle_window=window)
        EXPECTED["orders"][f"{unit} {window} {epoch} {dp}"] = order
    for dp, epoch in product((1, 2, 4), (0, 1)):
        EXPECTED["orders"][f"blend 1 {epoch} {dp}"] = drawn(blend, dp, epoch=epoch)

    first, state = drawn(ended, 2), ended(0, 2).state_dict(12)
    second, run = drawn(ended, 3, state), ended(0, 3)
    run.load_state_dict(state)
    state, run = run.state_dict(24), ended(0, 3)
    run.load_state_dict(state)
    run.skip(samples=[(40, 44)])
    taken = [*first[0][:6], *first[1][:6], *chain(*(rank[:4] for rank in second))]
    keep("dataset", run.state_dict(), taken, drawn(ended, 2, run.state_dict()))

    run = ended(0, 1, consumer="run", micro_batches_per_step=2)
    batches = run.batches(epochs=2, collate_fn=list)
    run.commit(0, last_epoch=False)
    assert len(list(batches)) == 26
    taken = [row["id"] for batch in islice(batches, 10) for row in batch]
    batches.commit()
    keep("batches", batches.state_dict(), taken, [[row["id"] for batch in batches for row in batch]])

    for name, make, consumed in (("blend", blend, 24), ("sequences", packs, 4)):
        whole, state = drawn(make, 2), make(0, 2).state_dict(consumed)
        taken = whole[0][: consumed // 2] + whole[1][: consumed // 2]
        keep(name, state, taken, drawn(make, 3 if make is blend else 1, state))

    stream = lazyshard.LazyShardedStream(ended(0, 1, batch_size=4), at_end="loop")
    whole, _ = [row["id"] for row in stream], stream.set_epoch(0)
    taken = [row["id"] for row in islice(stream, 6)]
    keep("stream", stream.state_dict(), taken, [whole[6:]])
    keep("stream_over", stream.state_dict(56), whole, [[]])

    shard = lazyshard.streaming_shard(range(23), 2, 1, 3)
    whole, taken = list(shard), list(islice(iter(shard), 5))
    keep("streaming_shard", shard.state_dict(), taken, [whole[5:]])


def checkpoints():
    """As ms-swift's trainers save: the position first, what says that the weights are there, then the cursors."""
    blended = {"interleave_prob": [0.75, 0.25], "stopping_strategy": "first_exhausted"}
    for name, streams, more in (("one", ["ended"], {}), ("two", ["ended", "other"], blended)):
        more |= {"dataset": [f"streams/{stream}" for stream in streams], "output_dir": f"checkpoints/{name}"}
        more |= {"columns": None, "strict": False, "remove_unused_columns": False, "sharded_lazy_max_wait": 1}
        args = megatron(train_iters=12, global_batch_size=4, micro_batch_size=2, sharded_lazy_consumer=name, **more)
        stream = open_train_stream(args, SimpleNamespace(encode=lambda row, **_: row))
        order = [stream[index]["id"] for index in range(48)]
        kept, folder = Checkpoints(stream.plan, f"checkpoints/{name}"), f"checkpoints/{name}/checkpoint-3"
        kept.begin(folder, 12, 3)
        put(f"{folder}/latest_checkpointed_iteration.txt", b"3")
        kept.commit()
        EXPECTED["states"][f"checkpoint {name}"] = {"trained": order[:12], "left": [order[12:]]}
    let_go_of_cursors()


if __name__ == "__main__":
    Path(sys.argv[1]).mkdir()
    os.chdir(sys.argv[1])
    for part in (streams, producers, retained, states, checkpoints):
        part()
    shutil.rmtree("whole")
    put("expected.json", EXPECTED)
    files = sorted(path for path in Path().rglob("*") if path.is_file())
    put("files.json", {str(path): xxhash.xxh3_64_hexdigest(path.read_bytes()) for path in files})
