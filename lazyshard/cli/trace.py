"""`lazyshard trace`: which sample a rank trained at a step, and at which step a sample was trained."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, Final, NamedTuple

import typer

from lazyshard.cli import exits
from lazyshard.cli.output import (
    StreamArgument,
    check_stream,
    chunk_bar,
    complain,
    count,
    epilog,
    pretty,
    say,
)
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
from lazyshard.inspection.tracing_sources import Origin, Origins, PlaceRows, SourcePlace, find_source, find_text
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
        str | None,
        typer.Option(
            "--state",
            metavar="FILE",
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
    if state is not None and not os.path.exists(state):
        raise typer.BadParameter(f"{state!r}: no such file or folder", param_hint="--state")
    if state is not None and consumer is not None:
        raise typer.BadParameter("give either --state or --consumer", param_hint="--consumer")
    if consumer is not None:
        try:
            check_consumer(consumer)
        except ValueError as cause:
            raise typer.BadParameter(str(cause), param_hint="--consumer") from cause
    asked = {"--step": step, "--sample": sample, "--chunk": chunk, "--source": source, "--text": text}
    given = [name for name, value in asked.items() if value is not None]
    if len(given) > 1:
        raise typer.BadParameter(f"one question at a time: give either {' or '.join(given)}", param_hint=given[1])
    for name, value, needed in (("--rank", rank, step), ("--row", row, chunk), ("--chunk", chunk, row)):
        if value is not None and needed is None:
            other = {"--rank": "--step", "--row": "--chunk", "--chunk": "--row"}[name]
            raise typer.BadParameter(f"goes with {other}", param_hint=name)
    if every and text is None:
        raise typer.BadParameter("goes with --text", param_hint="--all")
    if text is not None and not text:
        raise typer.BadParameter("an empty text is in every row", param_hint="--text")
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
    shown = _RowDisplay(rows, full, as_json, origins)
    return lambda: _run(stream_path(stream), None if state is None else Path(state), consumer, answer, shown)


def _steps(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"([0-9]{1,15})(?::([0-9]{1,15}))?", text)
    first = int(match[1]) if match else 0
    stop = int(match[2]) if match and match[2] else first + 1
    if match is None or not 1 <= first < stop <= _MAX_STEP:
        raise typer.BadParameter(
            f"{text!r}: expected N, or N:M for steps N to M - 1; the first step is 1", param_hint="--step"
        )
    return first - 1, stop - 1


def _samples(text: str) -> list[int]:
    if re.fullmatch(r"[0-9]{1,18}(,[0-9]{1,18})*", text) is None:
        raise typer.BadParameter(f"{text!r}: expected numbers of samples, as 17 or 17,23", param_hint="--sample")
    return [int(one) for one in text.split(",")]


def _source(text: str) -> SourcePlace:
    match = re.fullmatch(r"(.+):(L?)([0-9]{1,18})", text, re.DOTALL)
    if match is None or (match[2] and not int(match[3])):
        raise typer.BadParameter(
            f"{text!r}: expected FILE:BYTE, the byte from 0, or FILE:L and the line from 1", param_hint="--source"
        )
    number = int(match[3])
    return SourcePlace(match[1], line=number) if match[2] else SourcePlace(match[1], byte=number)


class _RowDisplay(NamedTuple):
    """How answers are shown: with rows, rows unshortened, as JSON, with where rows came from."""

    shown: bool
    full: bool
    as_json: bool
    origins: bool


class _TracedRun(NamedTuple):
    saved: SavedState
    stream: Stream
    tracing: Tracing
    rows: _RowDisplay
    origins: Origins


_Answer = Callable[[_TracedRun], int]


def _run(directory: Path, state: Path | None, consumer: str | None, answer: _Answer, rows: _RowDisplay) -> int:
    """Answers a question and returns the exit code. Raises the errors of what is read."""
    saved = _saved(directory, state, consumer)
    if saved is None:
        return exits.REFUSED
    stream = open_now(directory, saved.state.samples_per_chunk if saved.state.stream_id is None else None)
    tracing = Tracing(saved, facts_of(stream), str(directory))
    facts = tracing.facts
    if rows.origins and facts.stream_id is None:
        raise typer.BadParameter(
            "another program fills this directory, and keeps no positions in sources", param_hint="--origins"
        )
    return answer(_TracedRun(saved, stream, tracing, rows, Origins(directory, range(facts.retired, facts.chunks))))


def _saved(directory: Path, state: Path | None, consumer: str | None) -> SavedState | None:
    """Returns the state that is asked for; complains if there is none."""
    if state is not None:
        return read_state(state, directory)
    if consumer is None:
        names = [one.name for one in list_consumers(directory) if one.cursor is not None or one.problem is not None]
        if len(names) != 1:
            what = "holds no cursor; "
            if names:
                what = f"has the cursors of {', '.join(names)}: choose one by --consumer, or "
            raise typer.BadParameter(
                f"{directory} {what}give a checkpoint by --state", param_hint="--consumer" if names else "--state"
            )
        consumer = names[0]
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
    if this.rows.as_json:
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
        raise typer.BadParameter(f"no row {row}: chunk {chunk} has {count(rows, 'row')}", param_hint="--row")
    return _show_samples(this, [sample])


def _show_steps(this: _TracedRun, steps: tuple[int, int], rank: int | None) -> int:
    first, stop = steps
    tracing, rows = this.tracing, this.rows
    # Before anything is printed: whether all of it is known.
    places = [tracing.place(first), tracing.place(stop - 1)]
    for step, place in zip((first, stop - 1), places, strict=True):
        dp = tracing.state.parts[place.part].dp
        if rank is not None and rank >= dp:
            raise typer.BadParameter(
                f"no rank {rank}: step {step + 1} had {count(dp, 'data-parallel rank')}, from 0 to {dp - 1}",
                param_hint="--rank",
            )
    table = StepTable(tracing, stop)
    if not rows.as_json:
        say(table.heading())
    coming, nothing, last = False, True, tracing.epochs[-1]
    farthest = last
    for step in range(first, stop):
        if rank is not None and rank >= tracing.state.parts[tracing.place(step).part].dp:
            continue
        for drawn in tracing.at_step(step, rank):
            coming, farthest = coming or drawn.became == "to come", max(farthest, drawn.epoch)
            nothing = False
            _answer(this, drawn.sample, table.line(drawn), drawn_values(drawn, tracing))
    if nothing and not rows.as_json:
        which = f"step {first + 1}" if stop == first + 1 else f"steps {first + 1} to {stop}"
        say(f"Nothing of this stream was drawn at {which}{'' if rank is None else f' by rank {rank}'}.")
    if coming and not rows.as_json:
        trained = count(tracing.steps.trained, "step")
        beyond = ""
        if farthest > last:
            beyond = f" It reaches epoch {farthest}, beyond the end of epoch {last}, in which the state stands."
        say(f"The state has trained {trained}; what is to come holds if the run goes on with the same ranks.{beyond}")
    return exits.DONE


def _show_samples(this: _TracedRun, samples: Sequence[int]) -> int:
    """Shows what became of samples, each with its row if rows are shown."""
    tracing, rows = this.tracing, this.rows
    facts = tracing.facts
    # Before the first is shown: after an error there is nothing on stdout.
    if facts.ended and (beyond := [sample for sample in samples if sample >= facts.samples]):
        raise typer.BadParameter(
            f"no sample {', '.join(map(str, beyond))}: the stream has ended with {count(facts.samples, 'sample')}",
            param_hint="--sample",
        )
    for sample in samples:
        fates = list(tracing.fates(sample))
        if rows.as_json:
            for fate in fates:
                _answer(this, sample, "", fate_values(fate, tracing))
            continue
        chunk, row = divmod(sample, facts.samples_per_chunk)
        gone = f"; the producer has deleted the chunks below {facts.retired}" if chunk < facts.retired else ""
        say(f"sample {sample}: chunk {chunk}, row {row}{gone}")
        for fate in fates:
            say(f"  {fate_line(fate, tracing)}")
        if rows.origins and sample < facts.samples:
            say(f"  from {origins_text(_origins(this, sample))}")
        if rows.shown and sample < facts.samples:
            _show_row(this, _row(this, sample))
    return exits.DONE


def _show_source(this: _TracedRun, place: SourcePlace) -> int:
    facts = this.tracing.facts
    if facts.stream_id is None:
        raise typer.BadParameter(
            "another program fills this directory, and keeps no positions in sources; look for the row with --text",
            param_hint="--source",
        )
    chunks = range(facts.retired, facts.chunks)
    found = find_source(this.stream.directory, chunks, facts.samples_per_chunk, place)
    if found.samples:
        if not this.rows.as_json and len(found.samples) > 1:
            say(f"{place}: {count(len(found.samples), 'row')} are alike, so it is one of these")
        return _show_samples(this, found.samples)
    if this.rows.as_json:
        say(json.dumps(_source_values(place, found, this.tracing)))
    else:
        (first, stop), each = found.chunks, facts.samples_per_chunk
        which = f"chunk {first}" if stop == first + 1 else f"chunks {first} to {stop - 1}"
        last = min(stop * each, facts.samples) - 1
        say(
            f"{place}: its row is in {which}, among the samples {first * each} to {last}; which one is not known: "
            f"{found.why}"
        )
    return exits.DONE


def _source_values(place: SourcePlace, found: PlaceRows, tracing: Tracing) -> dict[str, Any]:
    each = tracing.facts.samples_per_chunk
    samples = [found.chunks[0] * each, min(found.chunks[1] * each, tracing.facts.samples)]
    return {"source": str(place), "chunks": list(found.chunks), "samples": samples, "why": found.why}


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
    if deleted and not this.rows.as_json:
        say(f"{deleted}.")
    if matches is not None and len(samples) > matches and not this.rows.as_json:
        say(f"These are the first {matches}; --all shows all.")
    return exits.DONE


def _answer(this: _TracedRun, sample: int, line: str, values: dict[str, Any]) -> None:
    published = sample < this.tracing.facts.samples
    row = _row(this, sample) if this.rows.shown and published else None
    if this.rows.origins and published:
        origins = _origins(this, sample)
        line, values = f"{line}  {origins_text(origins)}", values | {"origins": origins_values(origins)}
    if this.rows.as_json:
        say(with_row(values, row) if this.rows.shown else json.dumps(values))
        return
    say(line)
    if this.rows.shown:
        _show_row(this, row)


def _origins(this: _TracedRun, sample: int) -> tuple[Origin, ...]:
    return this.origins.of(*divmod(sample, this.tracing.facts.samples_per_chunk))


def _row(this: _TracedRun, sample: int) -> ShownRow | None:
    """Reads a row; None if its chunk is deleted."""
    chunk, row = divmod(sample, this.tracing.facts.samples_per_chunk)
    if chunk < this.tracing.facts.retired:
        return None
    return next(read_rows(this.stream, chunk, row, 1))


def _show_row(this: _TracedRun, row: ShownRow | None) -> None:
    if row is None:
        say("  its row cannot be shown: the chunk is deleted")
        return
    for line in pretty(row.value, row.line, full=this.rows.full).split("\n"):
        say(f"  {line}")
