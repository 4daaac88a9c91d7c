"""Answers the questions of `lazyshard trace`, and prints the answers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import orjson
import typer

from lazyshard.cli import exits
from lazyshard.cli.progress import chunk_bar
from lazyshard.cli.shortening import shorten, with_lists
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
from lazyshard.cli.wording import complain, count, say
from lazyshard.inspection.inspection import ShownRow, read_rows
from lazyshard.inspection.tracing import Tracing, facts_of
from lazyshard.inspection.tracing_sources import Origin, Origins, SourcePlace, SourceRows, find_source, find_text
from lazyshard.inspection.tracing_states import SavedState, read_state, state_of_cursor
from lazyshard.stream.consumers import list_consumers
from lazyshard.stream.cursor import read_cursor
from lazyshard.stream.opening import open_now
from lazyshard.stream.stream import Stream


@dataclass(frozen=True, slots=True)
class Question:
    """What is asked: one of these, or nothing.

    Attributes:
        steps: half-open range of steps, from 0.
        rank: of these steps only what this rank trained.
        samples: numbers of samples.
        row: chunk, and row in it.
        source: place in a source.
        text: text in rows.
        matches: how many of these rows at the most; None for all.
    """

    steps: tuple[int, int] | None = None
    rank: int | None = None
    samples: list[int] | None = None
    row: tuple[int, int] | None = None
    source: SourcePlace | None = None
    text: str | None = None
    matches: int | None = None


class Rows(NamedTuple):
    """How answers are shown: with rows, rows unshortened, as JSON, with where rows came from."""

    shown: bool
    full: bool
    as_json: bool
    origins: bool


class _Run(NamedTuple):
    stream: Stream
    tracing: Tracing
    rows: Rows
    origins: Origins


def run(directory: Path, state: Path | None, consumer: str | None, question: Question, rows: Rows) -> int:
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
    this = _Run(stream, tracing, rows, Origins(directory, range(facts.retired, facts.chunks)))
    if question.steps is not None:
        _show_steps(this, *question.steps, question.rank)
    elif question.samples is not None:
        _show_samples(this, question.samples)
    elif question.row is not None:
        _show_samples(this, [_sample_of(tracing, *question.row)])
    elif question.source is not None:
        _show_source(this, question.source)
    elif question.text is not None:
        return _show_text(this, question.text, question.matches)
    elif rows.as_json:
        say(json.dumps(course_values(saved, tracing)))
    else:
        for line in course_lines(saved, tracing):
            say(line)
    return exits.DONE


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


def _sample_of(tracing: Tracing, chunk: int, row: int) -> int:
    facts = tracing.facts
    sample = chunk * facts.samples_per_chunk + row
    if row >= facts.samples_per_chunk or (chunk < facts.chunks and sample >= facts.samples):
        rows = min(facts.samples_per_chunk, facts.samples - chunk * facts.samples_per_chunk)
        raise typer.BadParameter(f"no row {row}: chunk {chunk} has {count(rows, 'row')}", param_hint="--row")
    return sample


def _show_steps(this: _Run, first: int, stop: int, rank: int | None) -> None:
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
        steps = f"step {first + 1}" if stop == first + 1 else f"steps {first + 1} to {stop}"
        say(f"Nothing of this stream was drawn at {steps}{'' if rank is None else f' by rank {rank}'}.")
    if coming and not rows.as_json:
        trained = count(tracing.steps.trained, "step")
        beyond = ""
        if farthest > last:
            beyond = f" It reaches epoch {farthest}, beyond the end of epoch {last}, in which the state stands."
        say(f"The state has trained {trained}; what is to come holds if the run goes on with the same ranks.{beyond}")


def _show_samples(this: _Run, samples: Sequence[int]) -> None:
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


def _show_source(this: _Run, place: SourcePlace) -> None:
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
        _show_samples(this, found.samples)
    elif this.rows.as_json:
        say(json.dumps(_source_values(place, found, this.tracing)))
    else:
        (first, stop), each = found.chunks, facts.samples_per_chunk
        which = f"chunk {first}" if stop == first + 1 else f"chunks {first} to {stop - 1}"
        last = min(stop * each, facts.samples) - 1
        say(
            f"{place}: its row is in {which}, among the samples {first * each} to {last}; which one is not known: "
            f"{found.why}"
        )


def _source_values(place: SourcePlace, found: SourceRows, tracing: Tracing) -> dict[str, Any]:
    each = tracing.facts.samples_per_chunk
    samples = [found.chunks[0] * each, min(found.chunks[1] * each, tracing.facts.samples)]
    return {"source": str(place), "chunks": list(found.chunks), "samples": samples, "why": found.why}


def _show_text(this: _Run, text: str, matches: int | None) -> int:
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


def _answer(this: _Run, sample: int, line: str, values: dict[str, Any]) -> None:
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


def _origins(this: _Run, sample: int) -> tuple[Origin, ...]:
    return this.origins.of(*divmod(sample, this.tracing.facts.samples_per_chunk))


def _row(this: _Run, sample: int) -> ShownRow | None:
    """Reads a row; None if its chunk is deleted."""
    chunk, row = divmod(sample, this.tracing.facts.samples_per_chunk)
    if chunk < this.tracing.facts.retired:
        return None
    return next(read_rows(this.stream, chunk, row, 1))


def _show_row(this: _Run, row: ShownRow | None) -> None:
    if row is None:
        say("  its row cannot be shown: the chunk is deleted")
        return
    try:
        value = with_lists(row.value) if this.rows.full else shorten(row.value)
        text = orjson.dumps(value, option=orjson.OPT_INDENT_2).decode()
    except orjson.JSONEncodeError:
        # Nested deeper than that can be written.
        text = row.line.decode().rstrip("\r\n")
    for line in text.split("\n"):
        say(f"  {line}")
