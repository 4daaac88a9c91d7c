"""Live distillation: a teacher generates texts while a student trains on them, with backpressure.

    python examples/live_distillation/run.py [FOLDER]

The teacher (teacher.py) is a Python function that yields an endless stream of rows, which `lazyshard-producer`
publishes. The student (student.py) is a training loop in another process. The producer stays at most eight chunks ahead
of what the student needs, so the teacher is no faster than the student. Chunks before the student's last checkpoint are
deleted, so a run of any length needs disk space for a few chunks only.

The student is started twice, as if it had been stopped in between; the teacher keeps running.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).parent
PER_CHUNK = 32
AHEAD = 8
STEPS = 128
"""Steps of 16 texts each, 64 chunks in total."""


def start_producer(stream: Path, log: Path) -> subprocess.Popen[bytes]:
    """Starts the producer with the teacher as its source."""
    command = f"""run --source python:teacher:rows --out {stream} --samples-per-chunk {PER_CHUNK} --no-progress
        --max-ahead {AHEAD}chunks --retain consumed --consumers student"""
    print("$ lazyshard-producer", " ".join(command.split()), "\n")
    with log.open("wb") as file:
        return subprocess.Popen([sys.executable, "-m", "lazyshard_producer", *command.split()], cwd=HERE, stderr=file)


def wait_until_held(stream: Path, producer: subprocess.Popen[bytes], trained: int) -> None:
    """Waits until the producer is `AHEAD` chunks ahead of `trained` chunks, and these are deleted."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and producer.poll() is None:
        there = sorted(path.name for path in stream.glob("chunk_*.jsonl"))
        if len(there) == AHEAD and (stream / "head.json").exists():
            head = json.loads((stream / "head.json").read_bytes())
            if head["chunks"] == trained + AHEAD and head["state"] == "waiting":
                print(f"  teacher: {head['chunks']} chunks published; {AHEAD} are on disk, from {there[0]} on")
                print(f"           waits: {head['note']}\n")
                return
        time.sleep(0.05)
    sys.exit(f"the producer is not {AHEAD} chunks ahead of {trained}; see producer.log")


def learn(stream: Path, folder: Path, steps: int) -> int:
    """Runs the student up to a step; returns the largest number of chunks on disk meanwhile."""
    most = 0
    student = subprocess.Popen([sys.executable, "student.py", str(stream), str(folder), str(steps)], cwd=HERE)
    while student.poll() is None:
        most = max(most, len(list(stream.glob("chunk_*.jsonl"))))
        time.sleep(0.02)
    if student.returncode:
        sys.exit(f"the student exited with code {student.returncode}")
    losses = [float(line.split()[0]) for line in (folder / "student.txt").read_text().splitlines()]
    last = sum(losses[-10:]) / 10
    print(f"  student: {len(losses)} steps, {len(losses) * 16:,} texts; loss {losses[0]:.3f} at start, {last:.3f} now")
    return most


def main() -> None:
    """Runs teacher and student side by side, and checks the result."""
    folder = Path(*sys.argv[1:] or ["runs/live_distillation"]).absolute()
    if folder.exists():
        sys.exit(f"{folder} already exists: remove it, or give another folder")
    folder.mkdir(parents=True)
    stream = folder / "stream"
    producer = start_producer(stream, folder / "producer.log")
    try:
        wait_until_held(stream, producer, trained=0)
        most = learn(stream, folder, STEPS // 2)
        wait_until_held(stream, producer, trained=STEPS // 2 * 16 // PER_CHUNK)
        most = max(most, learn(stream, folder, STEPS))
        wait_until_held(stream, producer, trained=STEPS * 16 // PER_CHUNK)
    finally:
        producer.send_signal(signal.SIGTERM)  # the same command would continue with the next text
        code = producer.wait()

    lines = (folder / "student.txt").read_text().splitlines()
    ids = [int(number) for line in lines for number in line.split()[1:]]
    losses = [float(line.split()[0]) for line in lines]
    published = json.loads((stream / "head.json").read_bytes())["chunks"]
    assert code == 0, f"the producer exited with code {code}"
    assert ids == list(range(STEPS * 16)), "a text was not trained, not once, or not in order"
    assert losses[-1] < losses[0] / 4, f"the student has not learnt: {losses[0]} to {losses[-1]}"
    assert published == len(ids) // PER_CHUNK + AHEAD, f"{published} chunks were published for {len(ids)} texts"
    assert most < published // 2, f"{most} chunks were on disk at a time"
    print(f"ok: {len(ids):,} texts trained, each once; at most {most} of {published} chunks were on disk at a time")


if __name__ == "__main__":
    main()
