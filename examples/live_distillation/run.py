"""Live distillation: a teacher makes up texts for as long as a student learns from them, and no further ahead.

    python examples/live_distillation/run.py [FOLDER]

The teacher (teacher.py) is a Python function that yields rows without end, and `lazyshard-producer` publishes them. The
student (student.py) is a training loop in another process. The producer is held at most eight chunks ahead of what the
student asks for, so the teacher works no faster than the student learns, and chunks that are behind the student's last
checkpoint are deleted: a run of any length takes the disk of a few chunks.

Here the student is started twice, as if it had been stopped in between; the teacher stays at work all the while.
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
"""Of 16 texts each: 64 chunks."""


def start_producer(stream: Path, log: Path) -> subprocess.Popen[bytes]:
    """Starts the producer with the teacher as its source."""
    command = f"""run --source python:teacher:rows --out {stream} --samples-per-chunk {PER_CHUNK} --no-progress
        --max-ahead {AHEAD}chunks --retain consumed --consumers student"""
    print("$ lazyshard-producer", " ".join(command.split()), "\n")
    with log.open("wb") as file:
        return subprocess.Popen([sys.executable, "-m", "lazyshard_producer", *command.split()], cwd=HERE, stderr=file)


def wait_until_held(stream: Path, producer: subprocess.Popen[bytes], trained: int) -> None:
    """Returns when the producer is as far ahead of so many trained chunks as it may be, and these are deleted."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and producer.poll() is None:
        there = sorted(path.name for path in stream.glob("chunk_*.jsonl"))
        if len(there) == AHEAD and (stream / "head.json").exists():
            head = json.loads((stream / "head.json").read_bytes())
            if head["chunks"] == trained + AHEAD and head["state"] == "waiting":
                print(f"  teacher: {head['chunks']} chunks published; {AHEAD} are there, from {there[0]} on")
                print(f"           waits: {head['note']}\n")
                return
        time.sleep(0.05)
    sys.exit(f"the producer is not {AHEAD} chunks ahead of {trained}; see producer.log")


def learn(stream: Path, folder: Path, steps: int) -> int:
    """Runs the student up to a step; returns the most chunks that were there meanwhile."""
    most = 0
    student = subprocess.Popen([sys.executable, "student.py", str(stream), str(folder), str(steps)], cwd=HERE)
    while student.poll() is None:
        most = max(most, len(list(stream.glob("chunk_*.jsonl"))))
        time.sleep(0.02)
    if student.returncode:
        sys.exit(f"the student has ended with code {student.returncode}")
    losses = [float(line.split()[0]) for line in (folder / "student.txt").read_text().splitlines()]
    last = sum(losses[-10:]) / 10
    print(f"  student: {len(losses)} steps, {len(losses) * 16:,} texts; loss {losses[0]:.3f} at first, {last:.3f} now")
    return most


def main() -> None:
    """Runs teacher and student side by side, and checks what they did."""
    folder = Path(*sys.argv[1:] or ["runs/live_distillation"]).absolute()
    if folder.exists():
        sys.exit(f"{folder} is there already: remove it, or give another folder")
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
    assert code == 0, f"the producer has ended with code {code}"
    assert ids == list(range(STEPS * 16)), "a text was not trained, or not once, or not in its turn"
    assert losses[-1] < losses[0] / 4, f"the student has not learnt: {losses[0]} to {losses[-1]}"
    assert published == len(ids) // PER_CHUNK + AHEAD, f"{published} chunks were published for {len(ids)} texts"
    assert most < published // 2, f"{most} chunks were there at a time"
    print(f"ok: {len(ids):,} texts trained, each once; of {published} chunks no more than {most} were there at a time")


if __name__ == "__main__":
    main()
