"""Tells which samples each rank trained at a step, and at which step a sample was trained.

All of it is computed from the state in a checkpoint or in the stream's cursor, and from how far the stream is
published: no log of samples is kept. It holds through every change of the number of ranks, and for chunks that are
deleted; only rows cannot be shown then.

Steps are numbered as the trainer does: the first is step 1, and checkpoint-N comes after step N. Samples, chunks, rows,
ranks and epochs are counted from 0. Without a question it shows how far the run is, and the parts of its course.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, Final, NoReturn

import typer

from lazyshard.cli import exits
from lazyshard.cli.inspect import row_text
from lazyshard.cli.output import StreamArgument, check_stream, chunk_bar, complain, count, epilog, pretty, say
from lazyshard.format.cursor import check_consumer
from lazyshard.inspection.inspection import ShownRow, read_rows
from lazyshard.inspection.tracing import Fate, Tracing, facts_of
from lazyshard.inspection.tracing_sequences import traced
from lazyshard.inspection.tracing_sources import Origins, SourcePlace, find_source, find_text
from lazyshard.inspection.tracing_states import SavedState, read_state, state_of_cursor
from lazyshard.store.urls import stream_path
from lazyshard.stream.consumers import list_consumers
from lazyshard.stream.cursor import read_cursor
from lazyshard.stream.stream import Stream, open_now

_FIRST_MATCHES: Final = 20
_NO_ORIGIN: Final = (
    "a source that is not known: its chunk or the one before it is deleted, or its block is published in part so far"
)

HELP: Final = __doc__

EPILOG: Final = epilog(
    [
        "lazyshard trace /shared/stream --state out/checkpoint-1200 --step 1180:1190 --rank 3 --rows",
        "lazyshard trace /shared/stream --sample 48123 --origins",
        "lazyshard trace /shared/stream --source train.jsonl:L1007",
        "lazyshard trace /shared/stream --text 'the odd sentence' --json",
    ],
    {
        0: "told",
        2: "usage; there is no such directory, state, rank, sample or chunk; it is not clear whose cursor is meant",
        3: "no row holds the text; a cursor holds no state",
        5: "the state is damaged, of another stream, or does not know what is asked; "
        "the stream is damaged, or there is none",
        7: "the filesystem or store failed: no permission, no answer",
    },
)


def command(
    stream: StreamArgument,
    state: Annotated[
        Path | None, typer.Option(metavar="FILE", exists=True, help="A checkpoint's folder, or a file with the state.")
    ] = None,
    consumer: Annotated[
        str | None, typer.Option(metavar="NAME", help="Take the state from this run's cursor. Default: the only one.")
    ] = None,
    step: Annotated[str | None, typer.Option(metavar="N[:M]", help="What step N, or N to M - 1, trained.")] = None,
    rank: Annotated[int | None, typer.Option(metavar="R", min=0, help="With --step: only this rank.")] = None,
    sample: Annotated[str | None, typer.Option(metavar="N[,N...]", help="When these samples were trained.")] = None,
    chunk: Annotated[int | None, typer.Option(metavar="K", min=0, help="With --row: when this was trained.")] = None,
    row: Annotated[int | None, typer.Option(metavar="I", min=0, help="The row in the chunk.")] = None,
    source: Annotated[
        str | None,
        typer.Option(metavar="FILE:BYTE", help="When the row of this byte, or line (FILE:L17), was trained."),
    ] = None,
    text: Annotated[str | None, typer.Option(metavar="TEXT", help="When the rows that hold it were trained.")] = None,
    every: Annotated[bool, typer.Option("--all", help=f"With --text: not the first {_FIRST_MATCHES} alone.")] = False,
    rows: Annotated[bool, typer.Option("--rows", help="Print the rows too.")] = False,
    full: Annotated[bool, typer.Option("--full", help="With --rows: shorten nothing.")] = False,
    origins: Annotated[bool, typer.Option("--origins", help="Say too which line of which source rows are of.")] = False,
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
    pairs: list[tuple[str, Any, str, Any]] = [("--rank", rank, "--step", step), ("--row", row, "--chunk", chunk)]
    pairs += [("--chunk", chunk, "--row", row), ("--all", every or None, "--text", text)]
    for name, value, other, needed in pairs:
        if value is not None and needed is None:
            _misused(name, f"goes with {other}")
    if text == "":
        _misused("--text", "an empty text is in every row")
    steps = None if step is None else _steps(step)
    if sample is not None and re.fullmatch(r"[0-9]{1,18}(,[0-9]{1,18})*", sample) is None:
        _misused("--sample", f"{sample!r}: expected numbers of samples, as 17 or 17,23")
    place = None if source is None else _source(source)

    def run() -> int:
        this = _open(stream_path(stream), state, consumer, rows, full, as_json, origins)
        if this is None:
            return exits.REFUSED
        if steps is not None:
            return this.show_steps(*steps, rank)
        if sample is not None:
            return this.show_samples([int(one) for one in sample.split(",")])
        if chunk is not None and row is not None:
            return this.show_place(chunk, row)
        if place is not None:
            return this.show_source(place)
        return this.show_course() if text is None else this.show_text(text, None if every else _FIRST_MATCHES)

    return run


def _misused(option: str, what: str) -> NoReturn:
    raise typer.BadParameter(what, param_hint=option)


def _steps(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"([0-9]{1,15})(?::([0-9]{1,15}))?", text)
    first = int(match[1]) if match else 0
    stop = int(match[2]) if match and match[2] else first + 1
    if not 1 <= first < stop <= 10**15:
        _misused("--step", f"{text!r}: expected N, or N:M for steps N to M - 1; the first step is 1")
    return first - 1, stop - 1


def _source(text: str) -> SourcePlace:
    match = re.fullmatch(r"(.+):(L?)([0-9]{1,18})", text, re.DOTALL)
    if match is None or (match[2] and not int(match[3])):
        _misused("--source", f"{text!r}: expected FILE:BYTE, the byte from 0, or FILE:L and the line from 1")
    number = int(match[3])
    return SourcePlace(match[1], line=number) if match[2] else SourcePlace(match[1], byte=number)


def _open(
    directory: Path, state: Path | None, consumer: str | None, rows: bool, full: bool, as_json: bool, origins: bool
) -> _TracedRun | None:
    """Returns the run; complains if there is no state of it. Raises the errors of what is read."""
    saved = _saved(directory, state, consumer)
    if saved is None:
        return None
    stream = open_now(directory, saved.state.samples_per_chunk if saved.state.stream_id is None else None)
    facts = facts_of(stream)
    tracing = traced(saved, facts, str(directory))
    if origins and facts.stream_id is None:
        _misused("--origins", "another program fills this directory, and keeps no positions in sources")
    found = Origins(directory, range(facts.retired, facts.chunks)) if origins else None
    return _TracedRun(saved, stream, tracing, found, rows, full, as_json)


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
    saved = None if cursor is None else state_of_cursor(directory, cursor)
    if cursor is None:
        complain(f"{directory}: consumer {consumer!r} has no cursor; give a checkpoint by --state")
    elif saved is None:
        complain(
            f"{directory}: the cursor of {consumer!r} holds no state of its run; give a checkpoint by --state. The "
            f"cursor of a run over sequences has none; nor has one under the trainer's own sampler (--data_sharding, "
            f"--group_by_length), which cannot be traced"
        )
    return saved


@dataclass(slots=True)
class _TracedRun:
    """A run, and how answers are shown: with where rows came from, with rows, rows unshortened, as JSON."""

    saved: SavedState
    stream: Stream
    tracing: Tracing
    origins: Origins | None
    shown: bool
    full: bool
    as_json: bool

    def remark(self, text: str) -> None:
        """Says what is for people alone."""
        if not self.as_json:
            say(text)

    def answer(self, sample: int, lines: Sequence[str], values: Sequence[dict[str, Any]]) -> None:
        """Shows what is known of a sample, in lines or JSON objects, with its row and its origins if asked for."""
        facts = self.tracing.facts
        chunk, number = divmod(sample, facts.samples_per_chunk)
        published, row = sample < facts.samples, None
        if self.shown and published and chunk >= facts.retired:
            row = next(read_rows(self.stream, chunk, number, 1))
        if self.origins is not None and published:
            origins = self.origins.of(chunk, number)
            text = " or ".join(map(str, origins)) or _NO_ORIGIN
            # A draw of a step has one line.
            lines = [f"{lines[0]}  {text}"] if len(lines) == 1 else [*lines, f"  from {text}"]
            values = [one | {"origins": [asdict(origin) for origin in origins]} for one in values]
        if self.as_json:
            lines = [_with_row(one, row) if self.shown else json.dumps(one) for one in values]
        elif self.shown and row is not None:
            lines = [*lines, *(f"  {one}" for one in pretty(row.value, row.line, full=self.full).split("\n"))]
        elif self.shown and published:
            lines = [*lines, "  its row cannot be shown: the chunk is deleted"]
        for line in lines:
            say(line)

    def show_course(self) -> int:
        values, lines = _course_values(self.saved, self.tracing), _course_lines(self.saved, self.tracing)
        for line in [json.dumps(values)] if self.as_json else lines:
            say(line)
        return exits.DONE

    def show_place(self, chunk: int, row: int) -> int:
        facts, each = self.tracing.facts, self.tracing.facts.samples_per_chunk
        sample = chunk * each + row
        if row >= each or (chunk < facts.chunks and sample >= facts.samples):
            rows = min(each, facts.samples - chunk * each)
            _misused("--row", f"no row {row}: chunk {chunk} has {count(rows, 'row')}")
        return self.show_samples([sample])

    def show_steps(self, first: int, stop: int, rank: int | None) -> int:
        tracing = self.tracing
        # Before anything is printed: whether all of it is known.
        for step in (first, stop - 1):
            dp = tracing.state.parts[tracing.place(step).part].dp
            if rank is not None and rank >= dp:
                ranks = f"step {step + 1} had {count(dp, 'data-parallel rank')}, from 0 to {dp - 1}"
                _misused("--rank", f"no rank {rank}: {ranks}")
        widths = _column_widths(tracing, stop)
        self.remark(_aligned(list(widths), widths.values()))
        coming, nothing, last = False, True, tracing.epochs[-1]
        farthest = last
        for step in range(first, stop):
            if rank is not None and rank >= tracing.state.parts[tracing.place(step).part].dp:
                continue
            for drawn in tracing.at_step(step, rank):
                coming, farthest = coming or drawn.became == "to come", max(farthest, drawn.epoch)
                nothing = False
                values = _fate_values(drawn, tracing)
                line = _aligned(["-" if values[name] is None else values[name] for name in widths], widths.values())
                self.answer(drawn.sample, [line if drawn.became == "trained" else f"{line}  {drawn.became}"], [values])
        if nothing:
            which = f"step {first + 1}" if stop == first + 1 else f"steps {first + 1} to {stop}"
            self.remark(f"Nothing of this stream was drawn at {which}{'' if rank is None else f' by rank {rank}'}.")
        if coming:
            trained, beyond = count(tracing.steps.trained, "step"), ""
            if farthest > last:
                beyond = f" It reaches epoch {farthest}, beyond the end of epoch {last}, in which the state stands."
            holds = "what is to come holds if the run goes on with the same ranks"
            self.remark(f"The state has trained {trained}; {holds}.{beyond}")
        return exits.DONE

    def show_samples(self, samples: Sequence[int]) -> int:
        tracing, facts = self.tracing, self.tracing.facts
        # Before the first is shown: after an error there is nothing on stdout.
        if facts.ended and (beyond := [sample for sample in samples if sample >= facts.samples]):
            has = f"the stream has ended with {count(facts.samples, 'sample')}"
            _misused("--sample", f"no sample {', '.join(map(str, beyond))}: {has}")
        for sample in samples:
            fates = list(tracing.fates(sample))
            chunk, row = divmod(sample, facts.samples_per_chunk)
            gone = f"; the producer has deleted the chunks below {facts.retired}" if chunk < facts.retired else ""
            lines = [f"sample {sample}: chunk {chunk}, row {row}{gone}"]
            lines += (f"  {_fate_line(fate, tracing)}" for fate in fates)
            fewer = [{"fewer_than_step": tracing.fewer_than_step(fate)} for fate in fates]
            values = [_fate_values(fate, tracing) | more for fate, more in zip(fates, fewer, strict=True)]
            self.answer(sample, lines, values)
        return exits.DONE

    def show_source(self, place: SourcePlace) -> int:
        facts, each = self.tracing.facts, self.tracing.facts.samples_per_chunk
        if facts.stream_id is None:
            keeps = "another program fills this directory, and keeps no positions in sources"
            _misused("--source", f"{keeps}; look for the row with --text")
        found = find_source(self.stream.directory, range(facts.retired, facts.chunks), each, place)
        if found.samples:
            if len(found.samples) > 1:
                self.remark(f"{place}: {count(len(found.samples), 'row')} are alike, so it is one of these")
            return self.show_samples(found.samples)
        first, stop = found.chunks
        samples = [first * each, min(stop * each, facts.samples)]
        if self.as_json:
            say(json.dumps({"source": str(place), "chunks": list(found.chunks), "samples": samples, "why": found.why}))
        which = f"chunk {first}" if stop == first + 1 else f"chunks {first} to {stop - 1}"
        among = f"its row is in {which}, among the samples {samples[0]} to {samples[1] - 1}"
        self.remark(f"{place}: {among}; which one is not known: {found.why}")
        return exits.DONE

    def show_text(self, text: str, matches: int | None) -> int:
        facts = self.tracing.facts
        with chunk_bar() as show:
            found = find_text(self.stream, range(facts.retired, facts.chunks), text, show)
            # One more than is shown tells whether there are more.
            samples = list(found if matches is None else islice(found, matches + 1))
        self.show_samples(samples[:matches])
        deleted = f"{count(facts.retired, 'chunk')} not searched: deleted by the producer" if facts.retired else ""
        if not samples:
            why = f"; {deleted}" if deleted else ""
            complain(f"{self.stream.directory}: no row in the chunks that are there holds this text{why}")
            return exits.REFUSED
        if deleted:
            self.remark(f"{deleted}.")
        if matches is not None and len(samples) > matches:
            self.remark(f"These are the first {matches}; --all shows all.")
        return exits.DONE


def _column_widths(tracing: Tracing, stop: int) -> dict[str, int]:
    """Returns the columns of the draws of steps below `stop`, and how wide each is, before the first draw is known."""
    each, parts, last = tracing.facts.samples_per_chunk, tracing.state.parts, max(0, tracing.facts.samples - 1)
    positions = max(max(part.draws for part in parts), stop * max(part.draws_per_step for part in parts))
    most = {"step": stop, "part": len(parts) - 1, "rank": max(part.dp for part in parts) - 1, "position": positions}
    most |= {"epoch": tracing.epochs[-1] + 1, "sample": last, "chunk": last // each, "row": each - 1}
    return {name: max(len(name), len(str(high))) for name, high in most.items()}


def _aligned(values: Iterable[Any], widths: Iterable[int]) -> str:
    """Returns a line of a table."""
    return "  ".join(f"{value:>{width}}" for value, width in zip(values, widths, strict=True))


def _course_lines(saved: SavedState, tracing: Tracing) -> Iterator[str]:
    """Yields how far a run is, and its parts."""
    state, steps, member = saved.state, tracing.steps, saved.member
    told = f" in {count(steps.trained, 'step')}" if steps.unknown is None else ""
    epoch = "" if not state.consumed else f", the last of them in epoch {tracing.epochs[-1]}"
    what = "sample" if saved.sequences is None else "sequence"
    yield f"{saved.file}: {count(state.consumed, what)} trained{told}{epoch}"
    if member is not None:
        streams, samples = len(member.blend.parts[-1].members), member.blend.consumed
        own = f"; this one gives {member.share:.2%} now" if member.blended else ", in which this one is no more"
        others = f"of a blend of {count(streams, 'stream')}, {count(samples, 'sample')} of all"
        yield f"{others}{own}; positions and samples below are this stream's"
    rows = [("part", "ranks", "micro batch", "steps", "positions", f"{what}s")]
    for number, (part, own_steps) in enumerate(zip(state.parts, steps.parts, strict=True)):
        first, stop = own_steps.first_step, own_steps.stop_step
        which = f"{first + 1} to {stop}" if stop > first else "none yet"
        if not part.trained or not own_steps.known:
            which = "not known" if part.trained else "skipped"
        samples = part.dp * part.draws
        rows.append((str(number), str(part.dp), str(part.batch_size), which, str(part.draws), f"{samples:,}"))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    yield from (_aligned(row, widths) for row in rows)
    for number, part in enumerate(state.parts):
        if part.skip:
            out = sum(stop - start for start, stop in part.skip)
            yield f"left out from part {number} on: {count(out, 'sample')}: {ranges_text(part.skip)}"
        if part.epoch is not None and number:
            yield f"part {number} begins epoch {part.epoch}"


def _course_values(saved: SavedState, tracing: Tracing) -> dict[str, Any]:
    """Returns the same as JSON values."""
    return {
        "state": (saved.sequences or saved.state).to_dict(),
        "file": str(saved.file),
        "steps": tracing.steps.trained if tracing.steps.unknown is None else None,
        "consumed": saved.state.consumed,
        "epochs": [tracing.epochs[0], tracing.epochs[-1]],
        "total": tracing.total,
        "published": tracing.facts.samples,
        "retired": tracing.facts.retired,
        "blend": None if saved.member is None else saved.member.blend.to_dict(),
    }


def _fate_line(fate: Fate, tracing: Tracing) -> str:
    """Returns what became of a sample in an epoch."""
    if fate.became == "not published":
        return "not published yet"
    if fate.rank is None:
        text = {
            "to come": "to come; when is certain once more is published",
            "skipped": f"skipped on purpose: left out from part {fate.part} on",
            "left out": "not trained: its stream is blended no more",
            "left over": "left over at the epoch's end, where less than a batch for every rank is left",
            "cut short": "not trained: another epoch was begun before this one was over",
            "in no sequence": "not trained: it has no tokens, or more than a sequence",
            "before": "trained, or left out: its chunk is deleted, so its sequence cannot be made again",
            "beyond the end": f"not trained: it lies beyond max_total_samples = {tracing.state.max_total_samples}",
        }[fate.became]
        return f"epoch {fate.epoch}: {text}"
    where = f"(part {fate.part}, position {fate.position})"
    at = "" if fate.step is None else f" at step {fate.step + 1}"
    if fate.became == "trained":
        unknown = "; the state does not say at which step" if fate.step is None else ""
        text = f"trained{at} by rank {fate.rank} {where}{unknown}"
    elif fate.became == "skipped":
        text = f"skipped on purpose: it was rank {fate.rank}'s {where} among steps that were left out"
    else:
        text = f"to come{at}, on rank {fate.rank}, if the run goes on as it is {where}"
        if (whole := tracing.fewer_than_step(fate)) is not None:
            text += f"; its epoch has too few left for the {whole:,} of that step: left over, if training stops there"
    return f"epoch {fate.epoch}: {text}"


def _fate_values(fate: Fate, tracing: Tracing) -> dict[str, Any]:
    """Returns what became of a sample in an epoch as JSON values."""
    chunk, row = divmod(fate.sample, tracing.facts.samples_per_chunk)
    values = fate._asdict() | {"step": None if fate.step is None else fate.step + 1}
    became, deleted = values.pop("became"), chunk < tracing.facts.retired
    return values | {"chunk": chunk, "row": row, "became": became, "deleted": deleted}


def _with_row(values: dict[str, Any], row: ShownRow | None) -> str:
    """Returns values of JSON with a row, written digit by digit as it is; null for one that is deleted."""
    if row is None:
        return json.dumps(values | dict.fromkeys(("byte", "bytes", "tokens", "value")))
    text = row_text(row)
    # What is told of a row but not of its draw begins there.
    rest = text[text.index('"byte": ') :]
    return f"{json.dumps(values)[:-1]}, {rest}"


def ranges_text(ranges: Sequence[Sequence[int]], shown: int = 8) -> str:
    """Returns half-open ranges in words, the first and the last number of each.

    >>> ranges_text([(3, 4), (7, 10)]), ranges_text([(i, i + 1) for i in range(0, 20, 2)], 2)
    ('3, 7 to 9', '0, 2 and 8 more ranges')
    """
    text = ", ".join(f"{a}" if b == a + 1 else f"{a} to {b - 1}" for a, b in ranges[:shown])
    return text if len(ranges) <= shown else f"{text} and {len(ranges) - shown} more ranges"
