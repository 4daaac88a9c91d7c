"""Four generator processes write into one stream while a student trains on it; one is killed and restarted.

    python examples/many_writers.py [FOLDER]

Each generator is a writer with its own name and its own share of the prompts. `teacher` replaces a model: its answer to
a prompt is a number that the example can check. No process is responsible for the others: one of them, whichever
it is, gives the chunks of all their numbers in the stream, and when it is killed another one takes over. The killed
generator continues after its last published row, so every answer is trained once.
"""

from __future__ import annotations

import multiprocessing
import sys
import time
from pathlib import Path

from lazyshard import ChunkWriter

WRITERS = 4
PROMPTS = 240
"""Prompts of each writer."""
PER_CHUNK = 10
BATCH = 8


def teacher(prompt: int) -> int:
    """Answers a prompt."""
    time.sleep(0.005)
    return prompt * prompt % 1009


def generate(stream: Path, number: int) -> None:
    """Answers the prompts of one writer, from where it stopped."""
    prompts = range(number * PROMPTS, (number + 1) * PROMPTS)
    with ChunkWriter(stream, PER_CHUNK, writer=f"generator-{number}", writers=WRITERS) as writer:
        for position in range(writer.source or 0, PROMPTS):
            prompt = prompts[position]
            writer.write({"prompt": prompt, "answer": teacher(prompt)}, source=position + 1)


def start(stream: Path, number: int) -> multiprocessing.process.BaseProcess:
    """Starts a generator."""
    process = multiprocessing.get_context("spawn").Process(target=generate, args=(stream, number))
    process.start()
    return process


def main() -> None:
    """Generates and trains side by side, kills a generator, and checks the result."""
    from lazyshard import LazyShardedDataset  # needs torch, whose import takes seconds; the generators do not need it

    folder = Path(*sys.argv[1:] or ["runs/many_writers"]).absolute()
    if folder.exists():
        sys.exit(f"{folder} already exists: remove it, or give another folder")
    folder.mkdir(parents=True)
    stream = folder / "stream"
    generators = [start(stream, number) for number in range(WRITERS)]
    trained: list[int] = []
    killed = False
    try:
        dataset = LazyShardedDataset(stream, batch_size=BATCH, num_samples=WRITERS * PROMPTS)
        for rows in dataset.batches(collate_fn=list):
            assert all(row["answer"] == row["prompt"] ** 2 % 1009 for row in rows), "an answer is wrong"
            trained += [row["prompt"] for row in rows]
            if len(trained) >= WRITERS * PROMPTS // 4 and not killed:
                killed = True
                generators[0].kill()
                generators[0].join()
                print(f"generator-0 was killed when {len(trained)} answers were trained; it is started again")
                generators[0] = start(stream, 0)
    finally:
        for generator in generators:
            generator.join(60)
            generator.kill()
    codes = [generator.exitcode for generator in generators]
    assert codes == [0] * WRITERS, f"the generators exited with {codes}"
    for number in range(WRITERS):
        first = number * PROMPTS
        own = sorted(prompt for prompt in trained if first <= prompt < first + PROMPTS)
        assert own == list(range(first, first + PROMPTS)), f"answers of generator-{number} were not trained once"
    print(f"ok: {len(trained)} answers of {WRITERS} generators trained, each once")


if __name__ == "__main__":
    main()
