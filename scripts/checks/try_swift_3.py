"""What `scripts/try_swift_3` runs and checks, with the Python of its environment.

    python try_swift_3.py WORK

WORK is made; it must not be there. Exit codes: 0 every check held, 1 one did not.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from typing import Any, Final

from tests.swift import commands, streams
from tests.swift.commands import Batch, Run

VERSIONS: Final = ("ms-swift", "transformers", "peft", "trl", "datasets", "accelerate", "torch", "lazyshard")

COMMON: Final[dict[str, Any]] = {
    "sharded_lazy": True,
    # 4.x calls it tuner_type.
    "tuner_type": None,
    "train_type": "full",
    # Without it accelerate names the device of a process "cpu:0", which transformers 4.57 gives to torch.load when it
    # resumes with several processes, and torch 2.13 refuses that name.
    "environment": {"ACCELERATE_TORCH_DEVICE": "cpu"},
}
"""Arguments of every `swift_sft`."""

MICRO_BATCH: Final = 2
"""As in `commands.SWIFT`."""


class Verdicts:
    """Prints what held and what did not."""

    def __init__(self) -> None:
        self.failed = 0

    def that(self, held: bool, what: str, detail: str) -> None:
        self.failed += not held
        print(f"  {'ok    ' if held else 'FAILED'} {what:<18} {detail}", flush=True)

    def ended_well(self, run: Run) -> None:
        self.that(run.returncode == 0, "exit code", f"{run.returncode} after {run.seconds:.0f} s")
        if run.returncode != 0:
            print(run.tail())

    def exactly_once(self, batches: Iterable[Batch], expected: int, samples: int) -> None:
        """Checks that each sample was trained once at the most, and `expected` of `samples` in all."""
        ids = [number for batch in batches for number in batch.ids]
        repeated = len(ids) - len(set(ids))
        foreign = len(set(ids) - set(range(samples)))
        self.that(
            len(ids) == expected and not repeated and not foreign,
            "exactly once",
            f"{len(ids)} of {samples} samples, {expected} expected; {repeated} repeated, {foreign} foreign",
        )

    def own_chunks(self, batches: Iterable[Batch], ranks: int, samples: int, samples_per_chunk: int) -> None:
        """Checks that each rank read its own chunks only; the chunks past the last whole stripe are dealt by rows."""
        stripes = samples // samples_per_chunk // ranks
        chunks = {(batch.dp, number // samples_per_chunk) for batch in batches for number in batch.ids}
        whole = {(rank, chunk) for rank, chunk in chunks if chunk < stripes * ranks}
        others = sum(chunk % ranks != rank for rank, chunk in whole)
        own = ", ".join(str(sum(rank == of for of, _ in whole)) for rank in range(ranks))
        self.that(
            not others and {rank for rank, _ in whole} == set(range(ranks)),
            "own chunks",
            f"{own} by rank, {others} of another rank",
        )


def ended(verdicts: Verdicts, work: Path, model: Path, processes: int) -> None:
    samples, samples_per_chunk = 100, 4
    print(
        f"\n{processes} process{'es' if processes > 1 else ''}, a stream of {samples} samples that has ended, one epoch"
    )
    stream = streams.write_stream(work / "stream", 0, samples, samples_per_chunk)
    run = commands.swift_sft(work, model, processes=processes, dataset=stream, num_train_epochs=1, **COMMON)
    verdicts.ended_well(run)
    verdicts.exactly_once(run.batches, samples, samples)
    verdicts.own_chunks(run.batches, processes, samples, samples_per_chunk)


def live(verdicts: Verdicts, work: Path, model: Path) -> None:
    processes, samples, samples_per_chunk, rate = 2, 303, 5, 6.0
    whole = samples // (processes * MICRO_BATCH)
    print(f"\n{processes} processes, a stream that is being produced with {rate:g} samples/s, --max_steps 1000")
    work.mkdir()
    source = streams.write_jsonl(work / "rows.jsonl", 0, samples)
    stream = work / "stream"
    more: dict[str, Any] = {"max_steps": 1000, "save_strategy": "steps", "save_steps": 1000}
    with streams.producing(stream, source, samples_per_chunk, rate):
        streams.wait_for_samples(stream, samples_per_chunk)
        with commands.start_swift_sft(work, model, processes=processes, dataset=stream, **COMMON, **more) as training:
            training.wait_for_step(1)
            at_first = streams.published(stream)
            run = training.wait()
    verdicts.ended_well(run)
    verdicts.that(at_first < samples, "while produced", f"first step with {at_first} of {samples} samples published")
    verdicts.exactly_once(run.batches, whole * processes * MICRO_BATCH, samples)
    verdicts.own_chunks(run.batches, processes, samples, samples_per_chunk)
    last = max((batch.step for batch in run.batches), default=0)
    verdicts.that(last == whole, "last step", f"{last}, the last whole batch of all ranks is {whole}")
    consumed = field(run.output_dir / f"checkpoint-{whole}" / "lazyshard.json", "consumed")
    # Beside each cursor lies what the run needs to read on, FOO.reading.json.
    files = [file for file in stream.glob("cursors/*.json") if not file.name.endswith(".reading.json")]
    cursors = {field(file, "consumed") for file in files}
    held = consumed == whole * processes * MICRO_BATCH and cursors == {consumed}
    verdicts.that(held, "checkpoint", f"checkpoint-{whole} at sample {consumed}, cursor at {cursors or None}")


def killed(verdicts: Verdicts, work: Path, model: Path) -> None:
    processes, samples, samples_per_chunk, every = 2, 160, 4, 5
    print(f"\n{processes} processes, kill -9 of all in mid-run, then --resume_from_checkpoint; {samples} samples")
    stream = streams.write_stream(work / "stream", 0, samples, samples_per_chunk)
    more: dict[str, Any] = {"num_train_epochs": 1, "save_strategy": "steps", "save_steps": every}
    more |= {"processes": processes, "dataset": stream, "output_dir": work / "output"}
    with commands.start_swift_sft(work / "first", model, **COMMON, **more) as training:
        training.wait_for_step(3 * every + 2)
        training.kill()
        before = training.wait().batches
    # The newest one may be half written; the position is written first, so it does not tell.
    step = 2 * every
    checkpoint = work / "output" / f"checkpoint-{step}"
    run = commands.swift_sft(work / "second", model, resume_from_checkpoint=checkpoint, **COMMON, **more)
    verdicts.ended_well(run)
    last, first = max(batch.step for batch in before), min((batch.step for batch in run.batches), default=0)
    verdicts.that(
        last > step and first == step + 1,
        "goes on",
        f"killed in step {last}, went on from checkpoint-{step} with step {first}",
    )
    kept = [batch for batch in before if batch.step <= step]
    verdicts.exactly_once([*kept, *run.batches], samples, samples)
    verdicts.own_chunks([*kept, *run.batches], processes, samples, samples_per_chunk)


def helped(verdicts: Verdicts, work: Path, model: Path) -> None:
    print("\nswift sft --help")
    run = commands.swift_sft(work, model, processes=1, command=("swift", "sft", "--help"))
    verdicts.that(run.returncode == 0 and "--sharded_lazy_max_wait " in run.output, "help", "shows the arguments")


def field(file: Path, name: str) -> Any:
    """Returns a field of a JSON file, None where there is no such file."""
    try:
        return json.loads(file.read_bytes())[name]
    except FileNotFoundError:
        return None


def main(arguments: list[str]) -> int:
    if len(arguments) != 1:
        print("usage: try_swift_3.py WORK", file=sys.stderr)
        return 2
    work = Path(arguments[0])
    work.mkdir()
    started = time.monotonic()
    print(f"Python {sys.version.split()[0]}, {', '.join(f'{name} {metadata.version(name)}' for name in VERSIONS)}")
    model = work / "model"
    maker = commands.CPU / "tiny_model.py"
    subprocess.run([sys.executable, str(maker), str(model), "qwen2"], check=True, capture_output=True)
    verdicts = Verdicts()
    helped(verdicts, work / "help", model)
    ended(verdicts, work / "ended-1", model, 1)
    ended(verdicts, work / "ended-2", model, 2)
    live(verdicts, work / "live", model)
    killed(verdicts, work / "killed", model)
    print(f"\n{verdicts.failed or 'no'} check(s) failed, {time.monotonic() - started:.0f} s", flush=True)
    return 1 if verdicts.failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
