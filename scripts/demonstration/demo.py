"""Trains a small language model on data while it is still being produced, and checks what was trained.

Run by `scripts/demo`; see its ``--help``. The producer's command, which publishes at a limited rate, and the training
job under torchrun run in their own processes, and this process monitors them.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shlex
import signal
import sys
import sysconfig
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Final

from rich.console import Console
from rich.text import Text

from lazyshard import LazyShardError, StreamReader
from lazyshard.stream import Published
from scripts.demonstration.demo_corpus import write_corpus
from scripts.demonstration.demo_processes import Child, adopt_orphans, end_all, exit_text, first_failed_rank, last_lines
from scripts.demonstration.demo_report import Times, count, report
from scripts.demonstration.demo_settings import BATCH, LEAST_STEPS, WORKERS, FolderRefused, Settings, parse, take_folder
from scripts.demonstration.demo_steps import StepFile

LINE_EVERY_S: Final = 5.0
LOOK_EVERY_S: Final = 0.1
RECENT_STEPS: Final = 20
"""Steps over which the displayed loss is averaged, as the loss of one batch is noisy."""

_BAR: Final = 30

SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Stopped(BaseException):
    """A signal asks the demo to stop."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


class DemoFailed(Exception):
    """The demo cannot continue: the reason, and the log of the process that died, if any."""

    def __init__(self, text: str, log: Path | None = None) -> None:
        super().__init__(text)
        self.log = log


class Watch:
    """Follows production and training, and prints a line every few seconds.

    Args:
        console: where to print.
        settings: of the run.
        samples: how many will be produced.
    """

    def __init__(self, console: Console, settings: Settings, samples: int) -> None:
        self.times = Times(time.monotonic(), 0.0)
        self.ranks = [StepFile(settings.folder / f"rank_{rank}.jsonl") for rank in range(settings.ranks)]
        self.published = Published(0, 0, False)
        self._console = console
        self._settings = settings
        self._samples = samples
        self._reader: StreamReader | None = None
        self._due = self.times.begun + LINE_EVERY_S

    def head(self) -> None:
        """Prints the headings of the lines."""
        self._console.print()
        bar = f"{'# trained + published':<{_BAR}}"
        self._console.print(f"  time  {bar}  {'published':>20}  {'trained':>7}   loss", style="dim")

    def look(self) -> None:
        """Reads the progress of both, and prints a line if one is due."""
        if self._reader is None and (self._settings.stream / "head.json").exists():
            self._reader = StreamReader(self._settings.stream, max_wait=10)
        if self._reader is not None and not self.published.ended:
            self.published = self._reader.refresh()
            if self.published.ended:
                self.times = self.times._replace(ended=time.monotonic())
        for rank in self.ranks:
            rank.follow()
        if time.monotonic() >= self._due:
            self._due += LINE_EVERY_S
            self.line()

    def line(self) -> None:
        """Prints the progress of both."""
        trained = sum(rank.samples for rank in self.ranks)
        losses = [step.loss for step in self.ranks[0].steps[-RECENT_STEPS:]]
        published = f"{self.published.samples:,} in {count(self.published.chunks, 'chunk')}"
        loss = f"{sum(losses) / len(losses):.2f}" if losses else "-"
        seconds = time.monotonic() - self.times.begun
        shown = bar(trained, self.published.samples, self._samples)
        self._console.print(f" {seconds:3.0f} s  {shown}  {published:>20}  {trained:>7,}  {loss:>5}")


def bar(trained: int, published: int, samples: int) -> str:
    """Returns a bar of the trained, published, and remaining samples.

    >>> bar(1, 2, 3)
    '##########++++++++++..........'
    """
    first, second = (count * _BAR // samples for count in (trained, published))
    return "#" * first + "+" * (second - first) + "." * (_BAR - second)


def start_producer(settings: Settings) -> Child:
    """Starts the producer's command."""
    command = [str(Path(sysconfig.get_path("scripts"), "lazyshard-producer")), "run", "--no-progress"]
    command += ["--source", str(settings.source), "--out", str(settings.stream)]
    command += ["--samples-per-chunk", str(settings.samples_per_chunk), "--rate", str(settings.rate)]
    return Child("producer", command, settings.folder / "producer.log")


def start_training(settings: Settings) -> Child:
    """Starts the training job as the command `torchrun` does."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
    command += ["--nproc_per_node", str(settings.ranks), str(Path(__file__).with_name("demo_train.py"))]
    command += [str(settings.stream), str(settings.folder)]
    return Child("torchrun", command, settings.folder / "torchrun.log")


def watch(watcher: Watch, producer: Child, training: Child, folder: Path) -> None:
    """Watches until both have finished.

    Raises:
        DemoFailed: One of them died or exited too early.
    """
    while True:
        codes = producer.code(), training.code()
        watcher.look()
        if codes[0]:
            raise DemoFailed(f"the producer {exit_text(codes[0])}", producer.log)
        if codes[0] == 0 and not watcher.published.ended:
            raise DemoFailed("the producer exited before the end of its data", producer.log)
        if codes[1]:
            failed = first_failed_rank(training.log.read_text(errors="replace"))
            if failed is None:
                raise DemoFailed(f"torchrun {exit_text(codes[1])}", training.log)
            raise DemoFailed(f"rank {failed[0]} {exit_text(failed[1])}", folder / f"rank_{failed[0]}.log")
        if codes[1] == 0 and not all(rank.finish and rank.steps for rank in watcher.ranks):
            raise DemoFailed("torchrun exited before the end of the stream", training.log)
        if codes == (0, 0):
            return
        time.sleep(LOOK_EVERY_S)


def run(console: Console, settings: Settings) -> bool:
    """Runs production, training and checks; returns whether all checks passed.

    Raises:
        DemoFailed: a process died.
    """
    started = time.monotonic()
    corpus = write_corpus(settings.source, settings.samples)
    version = ".".join(map(str, sys.version_info[:2]))
    if corpus.samples < LEAST_STEPS * settings.step_samples:
        raise DemoFailed(f"{sysconfig.get_paths()['stdlib']} has sources for {corpus.samples} samples only")
    console.print("lazyshard demo: training on data that is still being produced\n", style="bold")
    console.print(
        f"  data      {corpus.samples:,} functions and classes of Python {version} with what they do\n"
        f"            {corpus.shortest:,} to {corpus.longest:,} bytes each, half of them below {corpus.median:,}; "
        f"made in {time.monotonic() - started:.1f} s"
    )
    if corpus.samples < settings.samples:
        console.print(f"            (fewer than the {settings.samples:,} requested: this Python has no more)")
    console.print(
        f"  producer  publishes {settings.rate:,.10g} samples/s, {settings.samples_per_chunk} to a chunk, "
        f"in {settings.stream}\n"
        f"  training  {count(settings.ranks, 'process', 'es')} of torchrun, {BATCH} samples a step "
        f"and {WORKERS} loader workers each"
    )
    watcher = Watch(console, settings, corpus.samples)
    producer, training = start_producer(settings), start_training(settings)
    watcher.head()
    watch(watcher, producer, training, settings.folder)
    watcher.line()
    held = report(console, settings, watcher.ranks, watcher.times)
    stream = shlex.quote(str(settings.stream))
    console.print(f"\nThe files are kept for inspection:\n  ls {stream}\n  head -n 1 {stream}/chunk_00000.jsonl")
    return held


def _ignore_signals() -> None:
    # Ending all processes takes a few seconds at most, which another Ctrl-C must not interrupt.
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def _stop(number: int, frame: FrameType | None) -> None:
    _ignore_signals()
    raise Stopped(number)


def main(arguments: Sequence[str]) -> int:
    """Runs the demo and returns the exit code."""
    settings = parse(arguments)
    console, errors = (
        Console(markup=False, emoji=False, highlight=False, soft_wrap=True, stderr=stderr) for stderr in (False, True)
    )
    try:
        for number in SIGNALS:
            if number == signal.SIGINT or signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, _stop)
        if importlib.util.find_spec("torch") is None:
            raise DemoFailed("it trains with torch, which is not in .venv: the line of scripts/environment says why")
        with take_folder(settings.folder):
            adopt_orphans()
            try:
                return 0 if run(console, settings) else 1
            finally:
                _ignore_signals()
                end_all()
    except FolderRefused as refused:
        errors.print(f"scripts/demo: {refused}")
        return 2
    except (DemoFailed, LazyShardError) as failed:
        errors.print(Text.assemble(("\n  FAILED", "bold red"), f" {failed}"))
        if isinstance(failed, DemoFailed) and failed.log:
            lines = last_lines(failed.log)
            errors.print(f"         {failed.log} {'ends with' if lines else 'is empty'}")
            for text in lines:
                errors.print(f"         | {text}")
        return 1
    except Stopped as stopped:
        name = "Ctrl-C" if stopped.number == signal.SIGINT else signal.Signals(stopped.number).name
        errors.print(f"\nscripts/demo: stopped by {name}; all its processes have ended")
        return 128 + stopped.number
    except BrokenPipeError:
        # Nobody reads the screen any more; without this Python complains once more when it leaves.
        with contextlib.suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
