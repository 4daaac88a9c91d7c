"""`lazyshard trace`: which sample a rank trained at a step, and at which step a sample was trained."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, Final, NoReturn

import typer

from lazyshard.cli import exits
from lazyshard.cli.output import StreamArgument, check_stream, chunk_bar, complain, count, epilog, pretty, say
from lazyshard.cli.trace_view import (
    StepTable,
    course_lines,
    course_values,
    drawn_values,
    fate_line,
    fate_values,
    origins_text,
    origins_values,
    with_row,
)
from lazyshard.format.cursor import check_consumer
from lazyshard.inspection.inspection import ShownRow, read_rows
from lazyshard.inspection.tracing import Tracing, facts_of
from lazyshard.inspection.tracing_sources import Origin, Origins, SourcePlace, find_source, find_text
from lazyshard.inspection.tracing_states import SavedState, read_state, state_of_cursor
from lazyshard.store.urls import stream_path
from lazyshard.stream.consumers import list_consumers
from lazyshard.stream.cursor import read_cursor
from lazyshard.stream.stream import Stream, open_now

_FIRST_MATCHES: Final = 20

_MAX_STEP: Final = 10**15

HELP: Final = """Tells which samples each rank trained at a step, and at which step a sample was trained.

All of it is computed from the state in a checkpoint or in the stream's cursor, and from how far the stream is
published: no log of samples is kept. It holds through every change of the number of ranks, and for chunks that are
deleted; only rows cannot be shown then.

Steps are numbered as the trainer does: the first is step 1, and checkpoint-N comes after step N. Samples, chunks, rows,
ranks and epochs are counted from 0. Without a question it shows how far the run is, and the parts of its course."""

EPILOG: Final = epilog(
    [
        "lazyshard trace /shared/stream --state out/checkpoint-1200",
        "lazyshard trace /shared/stream --state out/checkpoint-1200 --step 1180:1190 --rank 3 --rows",
        "lazyshard trace /shared/stream --sample 48123 --origins",
        "lazyshard trace /shared/stream --source train.jsonl:L1007",
        "lazyshard trace /shared/stream --text 'the odd sentence' --json",
    ],
    {
        0: "told",
        2: "usage; there is no such directory, state, rank, sample or chunk; or it is not clear whose cursor is meant",
        3: "no row holds the text; a cursor holds no state",
        5: "the state is damaged, of another stream, or does not know what is asked; "
        "the stream is damaged, or there is none",
        7: "the filesystem or store failed: no permission, no answer",
    },
)


def command(
    stream: StreamArgument,
    state: Annotated[
        Path | None,
        typer.Option(
            "--state",
            metavar="FILE",
            exists=True,
            help="The state: a checkpoint's folder, its lazyshard.json, or a file with the state alone.",
        ),
    ] = None,
    consumer: Annotated[
        str | None,
        typer.Option(
            "--consumer", metavar="NAME", help="Take the state from this run's cursor. Default: if there is only one."
        ),
    ] = None,
    step: Annotated[
        str | None, typer.Option("--step", metavar="N[:M]", help="What was trained at step N, or at steps N to M - 1.")
    ] = None,
    rank: Annotated[
        int | None, typer.Option("--rank", metavar="R", min=0, help="With --step: only this data-parallel rank.")
    ] = None,
    sample: Annotated[
        str | None, typer.Option("--sample", metavar="N[,N...]", help="When these samples were trained.")
    ] = None,
    chunk: Annotated[
        int | None, typer.Option("--chunk", metavar="K", min=0, help="With --row: when this row was trained.")
    ] = None,
    row: Annotated[int | None, typer.Option("--row", metavar="I", min=0, help="The row in the chunk.")] = None,
    source: Annotated[
        str | None,
        typer.Option(
            "--source",
            metavar="FILE:BYTE",
            help="When the row of this byte of a source file was trained; FILE:L17 for its line 17, from 1.",
        ),
    ] = None,
    text: Annotated[
        str | None, typer.Option("--text", metavar="TEXT", help="When the rows that hold this text were trained.")
    ] = None,
    every: Annotated[
        bool, typer.Option("--all", help=f"With --text: all rows that hold it, not the first {_FIRST_MATCHES} alone.")
    ] = False,
    rows: Annotated[bool, typer.Option("--rows", help="Print the rows too.")] = False,
    full: Annotated[bool, typer.Option("--full", help="With --rows: shorten nothing.")] = False,
    origins: Annotated[
        bool, typer.Option("--origins", help="Say too which line of which source file each row has come from.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object a line; rows are whole.")] = False,
) -> Callable[[], int]:
    """Returns what is to be done; see `lazyshard.cli.command`."""
    check_stream(stream)
    if state is not None and consumer is not None:
        _misused("--consumer", "give either --state or --consumer")
    if consumer is not None:
        try:
            check_consumer(consumer)
        except ValueError as cause:
            _misused("--consumer", str(cause))
    asked = {"--step": step, "--sample": sample, "--chunk": chunk, "--source": source, "--text": text}
    given = [name for name, value in asked.items() if value is not None]
    if len(given) > 1:
        _misused(given[1], f"one question at a time: give either {' or '.join(given)}")
    together = {
        ("--rank", "--step"): (rank, step),
        ("--row", "--chunk"): (row, chunk),
        ("--chunk", "--row"): (chunk, row),
    }
    for (name, other), (value, needed) in (together | {("--all", "--text"): (every or None, text)}).items():
        if value is not None and needed is None:
            _misused(name, f"goes with {other}")
    if text == "":
        _misused("--text", "an empty text is in every row")
    answer: _Answer = _show_course
    if step is not None:
        answer = partial(_show_steps, steps=_steps(step), rank=rank)
    elif sample is not None:
        answer = partial(_show_samples, samples=_samples(sample))
    elif chunk is not None and row is not None:
        answer = partial(_show_place, chunk=chunk, row=row)
    elif source is not None:
        answer = partial(_show_source, place=_source(source))
    elif text is not None:
        answer = partial(_show_text, text=text, matches=None if every else _FIRST_MATCHES)
    shown = {"shown": rows, "full": full, "as_json": as_json, "with_origins": origins}
    return lambda: _run(stream_path(stream), state, consumer, answer, shown)


def _misused(option: str, what: str) -> NoReturn:
    raise typer.BadParameter(what, param_hint=option)


def _steps(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"([0-9]{1,15})(?::([0-9]{1,15}))?", text)
    first = int(match[1]) if match else 0
    stop = int(match[2]) if match and match[2] else first + 1
    if match is None or not 1 <= first < stop <= _MAX_STEP:
        _misused("--step", f"{text!r}: expected N, or N:M for steps N to M - 1; the first step is 1")
    return first - 1, stop - 1


def _samples(text: str) -> list[int]:
    if re.fullmatch(r"[0-9]{1,18}(,[0-9]{1,18})*", text) is None:
        _misused("--sample", f"{text!r}: expected numbers of samples, as 17 or 17,23")
    return [int(one) for one in text.split(",")]


def _source(text: str) -> SourcePlace:
    match = re.fullmatch(r"(.+):(L?)([0-9]{1,18})", text, re.DOTALL)
    if match is None or (match[2] and not int(match[3])):
        _misused("--source", f"{text!r}: expected FILE:BYTE, the byte from 0, or FILE:L and the line from 1")
    number = int(match[3])
    return SourcePlace(match[1], line=number) if match[2] else SourcePlace(match[1], byte=number)


@dataclass(slots=True)
class _TracedRun:
    """A run, and how answers are shown: with rows, rows unshortened, as JSON, with where rows came from."""

    saved: SavedState
    stream: Stream
    tracing: Tracing
    origins: Origins
    shown: bool
    full: bool
    as_json: bool
    with_origins: bool

    def row(self, sample: int) -> ShownRow | None:
        """Reads a row; None if its chunk is deleted."""
        facts = self.tracing.facts
        chunk, row = divmod(sample, facts.samples_per_chunk)
        return None if chunk < facts.retired else next(read_rows(self.stream, chunk, row, 1))

    def origins_of(self, sample: int) -> tuple[Origin, ...]:
        return self.origins.of(*divmod(sample, self.tracing.facts.samples_per_chunk))

    def remark(self, text: str) -> None:
        """Says what is for people alone."""
        if not self.as_json:
            say(text)

    def answer(self, sample: int, line: str, values: dict[str, Any]) -> None:
        """Shows what is known of a sample as a line or as JSON, with its row and its origins if these are shown."""
        published = sample < self.tracing.facts.samples
        row = self.row(sample) if self.shown and published else None
        if self.with_origins and published:
            origins = self.origins_of(sample)
            line, values = f"{line}  {origins_text(origins)}", values | {"origins": origins_values(origins)}
        if self.as_json:
            say(with_row(values, row) if self.shown else json.dumps(values))
            return
        say(line)
        if self.shown:
            self.show_row(row)

    def show_row(self, row: ShownRow | None) -> None:
        if row is None:
            say("  its row cannot be shown: the chunk is deleted")
            return
        for line in pretty(row.value, row.line, full=self.full).split("\n"):
            say(f"  {line}")


_Answer = Callable[[_TracedRun], int]


def _run(directory: Path, state: Path | None, consumer: str | None, answer: _Answer, shown: dict[str, bool]) -> int:
    """Answers a question and returns the exit code. Raises the errors of what is read."""
    saved = _saved(directory, state, consumer)
    if saved is None:
        return exits.REFUSED
    stream = open_now(directory, saved.state.samples_per_chunk if saved.state.stream_id is None else None)
    facts = facts_of(stream)
    tracing = Tracing(saved, facts, str(directory))
    if shown["with_origins"] and facts.stream_id is None:
        _misused("--origins", "another program fills this directory, and keeps no positions in sources")
    origins = Origins(directory, range(facts.retired, facts.chunks))
    return answer(_TracedRun(saved, stream, tracing, origins, **shown))


def _saved(directory: Path, state: Path | None, consumer: str | None) -> SavedState | None:
    """Returns the state that is asked for; complains if there is none."""
    if state is not None:
        return read_state(state, directory)
    if consumer is None:
        names = [one.name for one in list_consumers(directory) if one.cursor is not None or one.problem is not None]
        if not names:
            _misused("--state", f"{directory} holds no cursor; give a checkpoint by --state")
        if len(names) > 1:
            what = f"has the cursors of {', '.join(names)}: choose one by --consumer, or give a checkpoint by --state"
            _misused("--consumer", f"{directory} {what}")
        [consumer] = names
    cursor = read_cursor(directory, consumer)
    if cursor is None:
        complain(f"{directory}: consumer {consumer!r} has no cursor; give a checkpoint by --state")
        return None
    saved = state_of_cursor(directory, cursor)
    if saved is None:
        complain(
            f"{directory}: the cursor of {consumer!r} holds no state of its run; give a checkpoint by --state. A run "
            f"under the trainer's own sampler (--data_sharding, --group_by_length) has none and cannot be traced"
        )
    return saved


def _show_course(this: _TracedRun) -> int:
    if this.as_json:
        say(json.dumps(course_values(this.saved, this.tracing)))
    else:
        for line in course_lines(this.saved, this.tracing):
            say(line)
    return exits.DONE


def _show_place(this: _TracedRun, chunk: int, row: int) -> int:
    facts = this.tracing.facts
    sample = chunk * facts.samples_per_chunk + row
    if row >= facts.samples_per_chunk or (chunk < facts.chunks and sample >= facts.samples):
        rows = min(facts.samples_per_chunk, facts.samples - chunk * facts.samples_per_chunk)
        _misused("--row", f"no row {row}: chunk {chunk} has {count(rows, 'row')}")
    return _show_samples(this, [sample])


def _show_steps(this: _TracedRun, steps: tuple[int, int], rank: int | None) -> int:
    first, stop = steps
    tracing = this.tracing
    # Before anything is printed: whether all of it is known.
    for step in (first, stop - 1):
        dp = tracing.state.parts[tracing.place(step).part].dp
        if rank is not None and rank >= dp:
            ranks = f"step {step + 1} had {count(dp, 'data-parallel rank')}, from 0 to {dp - 1}"
            _misused("--rank", f"no rank {rank}: {ranks}")
    table = StepTable(tracing, stop)
    this.remark(table.heading())
    coming, nothing, last = False, True, tracing.epochs[-1]
    farthest = last
    for step in range(first, stop):
        if rank is not None and rank >= tracing.state.parts[tracing.place(step).part].dp:
            continue
        for drawn in tracing.at_step(step, rank):
            coming, farthest = coming or drawn.became == "to come", max(farthest, drawn.epoch)
            nothing = False
            this.answer(drawn.sample, table.line(drawn), drawn_values(drawn, tracing))
    if nothing:
        which = f"step {first + 1}" if stop == first + 1 else f"steps {first + 1} to {stop}"
        this.remark(f"Nothing of this stream was drawn at {which}{'' if rank is None else f' by rank {rank}'}.")
    if coming:
        trained, beyond = count(tracing.steps.trained, "step"), ""
        if farthest > last:
            beyond = f" It reaches epoch {farthest}, beyond the end of epoch {last}, in which the state stands."
        this.remark(
            f"The state has trained {trained}; what is to come holds if the run goes on with the same ranks.{beyond}"
        )
    return exits.DONE


def _show_samples(this: _TracedRun, samples: Sequence[int]) -> int:
    """Shows what became of samples, each with its row if rows are shown."""
    tracing, facts = this.tracing, this.tracing.facts
    # Before the first is shown: after an error there is nothing on stdout.
    if facts.ended and (beyond := [sample for sample in samples if sample >= facts.samples]):
        has = f"the stream has ended with {count(facts.samples, 'sample')}"
        _misused("--sample", f"no sample {', '.join(map(str, beyond))}: {has}")
    for sample in samples:
        fates = list(tracing.fates(sample))
        if this.as_json:
            for fate in fates:
                this.answer(sample, "", fate_values(fate, tracing))
            continue
        chunk, row = divmod(sample, facts.samples_per_chunk)
        gone = f"; the producer has deleted the chunks below {facts.retired}" if chunk < facts.retired else ""
        say(f"sample {sample}: chunk {chunk}, row {row}{gone}")
        for fate in fates:
            say(f"  {fate_line(fate, tracing)}")
        if this.with_origins and sample < facts.samples:
            say(f"  from {origins_text(this.origins_of(sample))}")
        if this.shown and sample < facts.samples:
            this.show_row(this.row(sample))
    return exits.DONE


def _show_source(this: _TracedRun, place: SourcePlace) -> int:
    facts, each = this.tracing.facts, this.tracing.facts.samples_per_chunk
    if facts.stream_id is None:
        keeps = "another program fills this directory, and keeps no positions in sources"
        _misused("--source", f"{keeps}; look for the row with --text")
    found = find_source(this.stream.directory, range(facts.retired, facts.chunks), each, place)
    if found.samples:
        if len(found.samples) > 1:
            this.remark(f"{place}: {count(len(found.samples), 'row')} are alike, so it is one of these")
        return _show_samples(this, found.samples)
    first, stop = found.chunks
    samples = [first * each, min(stop * each, facts.samples)]
    if this.as_json:
        say(json.dumps({"source": str(place), "chunks": list(found.chunks), "samples": samples, "why": found.why}))
    else:
        which = f"chunk {first}" if stop == first + 1 else f"chunks {first} to {stop - 1}"
        among = f"its row is in {which}, among the samples {samples[0]} to {samples[1] - 1}"
        say(f"{place}: {among}; which one is not known: {found.why}")
    return exits.DONE


def _show_text(this: _TracedRun, text: str, matches: int | None) -> int:
    facts = this.tracing.facts
    with chunk_bar() as show:
        found = find_text(this.stream, range(facts.retired, facts.chunks), text, show)
        # One more than is shown tells whether there are more.
        samples = list(found if matches is None else islice(found, matches + 1))
    _show_samples(this, samples[:matches])
    deleted = "" if not facts.retired else f"{count(facts.retired, 'chunk')} not searched: deleted by the producer"
    if not samples:
        why = f"; {deleted}" if deleted else ""
        complain(f"{this.stream.directory}: no row in the chunks that are there holds this text{why}")
        return exits.REFUSED
    if deleted:
        this.remark(f"{deleted}.")
    if matches is not None and len(samples) > matches:
        this.remark(f"These are the first {matches}; --all shows all.")
    return exits.DONE
