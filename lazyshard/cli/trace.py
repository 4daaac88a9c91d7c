"""`lazyshard trace`: shows which samples a step trained, and which step trained a sample."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, Final

from typer import BadParameter, Option

from lazyshard.cli import exits, output
from lazyshard.cli.inspect import row_text
from lazyshard.cli.output import chunk_bar, chunk_range, count, pretty, refuse_if, say
from lazyshard.errors import ConfigInvalid
from lazyshard.inspection.inspection import read_rows
from lazyshard.inspection.tracing import Fate, StreamFacts, Tracing, facts_of
from lazyshard.inspection.tracing_sequences import traced
from lazyshard.inspection.tracing_sources import Origins, SourcePlace, find_source, find_text
from lazyshard.inspection.tracing_states import SavedState, read_state, state_of_cursor
from lazyshard.part import SplitOf
from lazyshard.plan.deal import split_table
from lazyshard.stream.cursor import list_consumers, read_cursor
from lazyshard.stream.listing import read_manifest
from lazyshard.stream.stream import Stream, open_now

_FIRST_MATCHES: Final = 20
_KEEPS_NONE: Final = "another program writes this directory, so no positions in sources are recorded"
_Run = Tracing | str  # A run, or why none is known
_Answer = tuple[int | None, Sequence[str], Sequence[dict[str, Any]]]  # The sample, lines of text, values for --json
_COLUMNS: Final = ("step", "part", "rank", "position", "epoch", "sample", "chunk", "row")


def command(
    stream: output.StreamArgument,
    state: Annotated[Path | None, Option(metavar="FILE", exists=True, help="A checkpoint's folder or state.")] = None,
    consumer: Annotated[str | None, Option(metavar="NAME", help="Or this run's cursor. Default: the only one.")] = None,
    step: Annotated[str | None, Option(metavar="N[:M]", help="What step N, or steps N to M - 1, trained.")] = None,
    rank: Annotated[int | None, Option(metavar="R", min=0, help="With --step: only this rank.")] = None,
    sample: Annotated[str | None, Option(metavar="N[,N...]", help="When these samples were trained.")] = None,
    chunk: Annotated[int | None, Option(metavar="K", min=0, help="With --row: when this row was trained.")] = None,
    row: Annotated[int | None, Option(metavar="I", min=0, help="The row in the chunk.")] = None,
    source: Annotated[
        str | None, Option(metavar="FILE:BYTE", help="When the row of this byte, or line (FILE:L17), was trained.")
    ] = None,
    text: Annotated[str | None, Option(metavar="TEXT", help="When the rows that contain TEXT were trained.")] = None,
    every: Annotated[bool, Option("--all", help=f"With --text: more than the first {_FIRST_MATCHES} rows.")] = False,
    rows: Annotated[bool, Option("--rows", help="Print the rows too.")] = False,
    full: Annotated[bool, Option("--full", help="With --rows: do not shorten values.")] = False,
    origins: Annotated[bool, Option("--origins", help="Print the source and line of each row too.")] = False,
    as_json: Annotated[bool, Option("--json", help="Print one JSON object per line, with whole rows.")] = False,
) -> int:
    """Shows which samples each rank trained at a step, at which step a sample was trained, and where it came from.

    Computes the answer from the state in a checkpoint or in the stream's cursor and from the published part of the
    stream; no log of samples is needed. The answer takes changes of the number of ranks into account and covers deleted
    chunks, whose rows cannot be shown. If no run has left a state, answers about rows are their places and origins.

    Steps are numbered as in the trainer: the first is step 1, and checkpoint-N follows step N. Samples, chunks, rows,
    ranks and epochs are counted from 0. Without a question, shows the progress of the run and its parts.

    Examples:
        lazyshard trace /shared/stream --state out/checkpoint-1200 --step 1180:1190 --rank 3 --rows
        lazyshard trace /shared/stream --sample 48123 --origins
        lazyshard trace /shared/stream --source train.jsonl:L1007
        lazyshard trace /shared/stream --text 'the odd sentence' --json

    Exit codes:
        0  shown
        2  usage error; no such directory, state, rank, sample or chunk; or several cursors and no --consumer
        3  no row contains the text; or the cursor holds no state
        5  the state is damaged, belongs to another stream or cannot answer the question; or the stream is damaged or
           missing
        7  the filesystem or store failed: no permission, no answer
    """
    directory = output.find_stream(stream)
    refuse_if(state is not None and consumer is not None, "--consumer", "give either --state or --consumer")
    if consumer is not None:
        output.check_name(consumer, "--consumer")
    asked = {"--step": step, "--sample": sample, "--chunk": chunk, "--source": source, "--text": text}
    given = [name for name, value in asked.items() if value is not None]
    refuse_if(given[1:], ", ".join(given), "give only one of these options")
    pairs = (("--rank", rank, "--step", step), ("--row", row, "--chunk", chunk), ("--chunk", chunk, "--row", row))
    for name, value, other, needed in (*pairs, ("--all", every or None, "--text", text)):
        refuse_if(value is not None and needed is None, name, f"goes with {other}")
    refuse_if(text == "", "--text", "an empty text is in every row")
    steps = None if step is None else _steps(step)
    odd = sample is not None and re.fullmatch(r"[0-9]{1,18}(,[0-9]{1,18})*", sample) is None
    refuse_if(odd, "--sample", f"{sample!r}: expected numbers of samples, as 17 or 17,23")
    place = None if source is None else _source(source)
    saved = _saved(directory, state, consumer, needed=consumer is not None or steps is not None or not given)
    # Of a directory that another program fills the state has the rows in a chunk.
    of_foreign = isinstance(saved, SavedState) and saved.state.stream_id is None and saved.state.samples_per_chunk
    opened = open_now(directory, of_foreign or None)
    facts = facts_of(opened)
    tracing = saved if isinstance(saved, str) else traced(saved, facts, str(directory))
    refuse_if(origins and facts.stream_id is None, "--origins", _KEEPS_NONE)
    manifest = read_manifest(directory, None)
    shared = manifest is not None and manifest.writers is not None
    located = origins or (shared and steps is None)
    known = Origins(directory, facts.present, facts.samples_per_chunk) if located else None
    answers: Iterable[_Answer] = ()
    if sample is not None:
        answers = _of_samples(facts, tracing, [int(one) for one in sample.split(",")])
    elif chunk is not None and row is not None:
        answers = _of_place(facts, tracing, chunk, row)
    elif place is not None:
        answers = _of_source(opened, facts, tracing, place)
    elif text is not None:
        answers = _of_text(opened, facts, tracing, text, None if every else _FIRST_MATCHES)
    elif isinstance(saved, SavedState) and isinstance(tracing, Tracing):
        answers = [(None, list(_course_lines(saved, tracing)), [_course_values(saved, tracing)])]
        answers = answers if steps is None else _of_steps(tracing, *steps, rank)
    for line in _told(answers, opened, facts, known, full if rows else None, as_json):
        say(line)
    return exits.DONE


def _steps(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"([0-9]{1,15})(?::([0-9]{1,15}))?", text)
    first = int(match[1]) if match else 0
    stop = int(match[2]) if match and match[2] else first + 1
    expected = "expected N, or N:M for steps N to M - 1; the first step is 1"
    refuse_if(not 1 <= first < stop <= 10**15, "--step", f"{text!r}: {expected}")
    return first - 1, stop - 1


def _source(text: str) -> SourcePlace:
    match = re.fullmatch(r"(.+):(L?)([0-9]{1,18})", text, re.DOTALL)
    if match is None or (match[2] and not int(match[3])):
        expected = "expected FILE:BYTE, the byte from 0, or FILE:L and the line from 1"
        raise BadParameter(f"{text!r}: {expected}", param_hint="--source")
    number = int(match[3])
    return SourcePlace(match[1], line=number) if match[2] else SourcePlace(match[1], byte=number)


def _saved(directory: Path, state: Path | None, consumer: str | None, *, needed: bool) -> SavedState | str:
    """Returns the requested state. If there is none: raises ConfigInvalid if it is `needed`, else returns why."""
    if state is not None:
        return read_state(state, directory)
    if (name := consumer) is None:
        names = [one.name for one in list_consumers(directory) if one.cursor is not None or one.problem is not None]
        none = f"no run has written a cursor to {directory}; give its checkpoint with --state"
        refuse_if(needed and not names, "--state", none)
        if not names:
            return none
        what = f"has the cursors of {', '.join(names)}: choose one with --consumer, or give a checkpoint with --state"
        refuse_if(len(names) > 1, "--consumer", f"{directory} {what}")
        [name] = names
    cursor = read_cursor(directory, name)
    saved = None if cursor is None else state_of_cursor(directory, cursor)
    if saved is not None:
        return saved
    none = f"the cursor of {name!r} holds no state, as the run uses sequences or the trainer's own sampler"
    none = f"consumer {name!r} has no cursor" if cursor is None else none
    none = f"{directory}: {none}; give a checkpoint with --state"
    if needed:
        raise ConfigInvalid(none)
    return none


def _told(
    told: Iterable[_Answer], stream: Stream, facts: StreamFacts, known: Origins | None, full: bool | None, as_json: bool
) -> Iterator[str]:
    """Yields answers as text or JSON, with the origins of samples and, unless `full` is None, their rows."""
    for sample, lines, values in told:
        chunk, number = divmod(sample or 0, facts.samples_per_chunk)
        published, row = sample is not None and sample < facts.samples, None
        if known is not None and published:
            found = known.of(chunk, number)
            unknown = "an unknown source: a chunk is deleted, or only a part of its block is published so far"
            text = " or ".join(map(str, found))
            if (writer := known.writer(chunk, number)) is not None and writer[0]:
                text = f"row {writer[1]} of writer {writer[0]}{': ' if text else ''}{text}"
                values = [one | {"writer": writer[0], "writer_row": writer[1]} for one in values]
            text = text or unknown
            # Answers to --step have one line per draw.
            lines = [f"{lines[0]}  {text}"] if len(lines) == 1 else [*lines, f"  from {text}"]
            values = [one | {"origins": [origin._asdict() for origin in found]} for one in values]
        if full is not None and published and chunk >= facts.retired:
            row = next(read_rows(stream, chunk, number, 1))
        if as_json:
            asked = ("byte", "bytes", "tokens", "value") if full is not None and sample is not None else ()
            none = dict.fromkeys(asked)
            lines = [json.dumps(one | none) if row is None else row_text(row, one) for one in values]
        elif full is not None and published:
            deleted = ["the row cannot be shown: its chunk is deleted"]
            more = deleted if row is None else pretty(row.value, row.line, full=full)
            lines = [*lines, *(f"  {one}" for one in more)]
        yield from lines


def _of_place(facts: StreamFacts, tracing: _Run, chunk: int, row: int) -> Iterator[_Answer]:
    each = facts.samples_per_chunk
    sample = chunk * each + row
    none = row >= each or (chunk < facts.chunks and sample >= facts.samples)
    has = count(min(each, facts.samples - chunk * each), "row")
    refuse_if(none, "--row", f"no row {row}: chunk {chunk} has {has}")
    return _of_samples(facts, tracing, [sample])


def _of_steps(tracing: Tracing, first: int, stop: int, rank: int | None) -> Iterator[_Answer]:
    def ranks(step: int) -> int:
        return tracing.state.parts[tracing.place(step).part].dp

    # Fail before anything is printed if the state does not cover the steps.
    for step in (first, stop - 1):
        dp = ranks(step)
        had = f"step {step + 1} had {count(dp, 'data-parallel rank')}, from 0 to {dp - 1}"
        refuse_if(rank is not None and rank >= dp, "--rank", f"no rank {rank}: {had}")
    samples, each = tracing.facts.samples, tracing.facts.samples_per_chunk
    most = (stop, 0, 0, 0, 0, samples, samples // each, each - 1)
    widths = [max(len(name), len(str(high))) for name, high in zip(_COLUMNS, most, strict=True)]
    yield None, [_aligned(_COLUMNS, widths)], []
    became, farthest, last = set[str](), tracing.epochs[-1], tracing.epochs[-1]
    for step in range(first, stop):
        for drawn in tracing.at_step(step, rank) if rank is None or rank < ranks(step) else ():
            became.add(drawn.became)
            farthest = max(farthest, drawn.epoch)
            values = _fate_values(drawn, tracing)
            line = _aligned(["-" if values[name] is None else values[name] for name in _COLUMNS], widths)
            yield drawn.sample, [line if drawn.became == "trained" else f"{line}  {drawn.became}"], [values]
    if not became:
        which = f"step {first + 1}" if stop == first + 1 else f"steps {first + 1} to {stop}"
        none = f"No sample of this stream was drawn at {which}{'' if rank is None else f' by rank {rank}'}."
        yield None, [none], []
    if "to come" in became:
        beyond = f" These steps reach epoch {farthest}, beyond the end of epoch {last}, the current one of the state."
        holds = "later steps are predicted for a run that continues with the same ranks"
        trained = f"The state has trained {count(tracing.steps.trained, 'step')}"
        yield None, [f"{trained}; {holds}.{beyond if farthest > last else ''}"], []


def _of_samples(facts: StreamFacts, tracing: _Run, samples: Sequence[int]) -> Iterator[_Answer]:
    # Checked before the first answer, so that an error leaves nothing on stdout.
    beyond = ", ".join(str(sample) for sample in samples if facts.ended and sample >= facts.samples)
    has = f"the stream has ended with {count(facts.samples, 'sample')}"
    refuse_if(beyond, "--sample", f"no sample {beyond}: {has}")
    for sample in samples:
        chunk, row = divmod(sample, facts.samples_per_chunk)
        gone = f"; the producer has deleted the chunks below {facts.retired}" if chunk < facts.retired else ""
        lines = [f"sample {sample}: chunk {chunk}, row {row}{gone}"]
        if isinstance(tracing, str):
            values = {"sample": sample, "chunk": chunk, "row": row, "became": None, "deleted": chunk < facts.retired}
            unpublished = ["  not published yet"] if sample >= facts.samples else []
            yield sample, [*lines, *unpublished, f"  when it was trained is unknown: {tracing}"], [values]
            continue
        fates = list(tracing.fates(sample))
        lines += (f"  {_fate_line(fate, tracing)}" for fate in fates)
        fewer = ({"fewer_than_step": tracing.fewer_than_step(fate)} for fate in fates)
        yield sample, lines, [_fate_values(fate, tracing) | next(fewer) for fate in fates]


def _of_source(stream: Stream, facts: StreamFacts, tracing: _Run, place: SourcePlace) -> Iterator[_Answer]:
    each = facts.samples_per_chunk
    refuse_if(facts.stream_id is None, "--source", f"{_KEEPS_NONE}; look for the row with --text")
    found = find_source(stream.directory, facts.present, each, place)
    if found.samples:
        alike = f"{place}: {count(len(found.samples), 'row')} are identical, so it is one of these"
        yield None, [alike] if len(found.samples) > 1 else [], []
        yield from _of_samples(facts, tracing, found.samples)
        return
    first, stop = found.chunks
    samples = [first * each, min(stop * each, facts.samples)]
    values = {"source": str(place), "chunks": list(found.chunks), "samples": samples, "why": found.why}
    which = chunk_range(first, stop)
    among = f"its row, if it has one, is in {which}, among the samples {samples[0]} to {samples[1] - 1}"
    yield None, [f"{place}: {among}; which one is unknown: {found.why}"], [values]


def _of_text(stream: Stream, facts: StreamFacts, tracing: _Run, text: str, matches: int | None) -> Iterator[_Answer]:
    with chunk_bar() as report:
        found = find_text(stream, facts.present, text, report)
        # One more than is shown, to find out whether there are more
        samples = list(found if matches is None else islice(found, matches + 1))
    deleted = f"{count(facts.retired, 'chunk')} not searched: deleted by the producer"
    if not samples:
        why = f"; {deleted}" if facts.retired else ""
        raise ConfigInvalid(f"{stream.directory}: no row in the present chunks contains this text{why}")
    yield from _of_samples(facts, tracing, samples[:matches])
    yield None, [f"{deleted}."] if facts.retired else [], []
    more = matches is not None and len(samples) > matches
    yield None, [f"Only the first {matches} are shown; --all shows all."] if more else [], []


def _aligned(values: Iterable[Any], widths: Iterable[int]) -> str:
    """Returns a table row, with each value right-aligned."""
    return "  ".join(f"{value:>{width}}" for value, width in zip(values, widths, strict=True))


def _course_lines(saved: SavedState, tracing: Tracing) -> Iterator[str]:
    """Yields the progress of a run, and a table of its parts."""
    state, steps, member = saved.state, tracing.steps, saved.member
    told = f" in {count(steps.trained, 'step')}" if steps.unknown is None else ""
    epoch = "" if not state.consumed else f", the last of them in epoch {tracing.epochs[-1]}"
    what = "sample" if saved.sequences is None else "sequence"
    yield f"{saved.file}: {count(state.consumed, what)} trained{told}{epoch}"
    if tracing.split is not None:
        yield f"of the stream it draws only the split {tracing.split}"
    if member is not None:
        streams, samples = len(member.blend.parts[-1].members), member.blend.consumed
        own = f"; this stream's share is {member.share:.2%} now" if member.blended else ", without this stream now"
        others = f"in a blend of {count(streams, 'stream')} with {count(samples, 'sample')} trained"
        yield f"{others}{own}; positions and samples below are this stream's"
    rows = [("part", "ranks", "micro batch", "steps", "positions", f"{what}s")]
    for number, (part, own_steps) in enumerate(zip(state.parts, steps.parts, strict=True)):
        first, stop = own_steps.first_step, own_steps.stop_step
        which = f"{first + 1} to {stop}" if stop > first else "none yet"
        if not part.trained or not own_steps.known:
            which = "unknown" if part.trained else "skipped"
        trained = f"{part.dp * part.draws:,}"
        rows.append((str(number), str(part.dp), str(part.batch_size), which, str(part.draws), trained))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    yield from (_aligned(row, widths) for row in rows)
    for number, part in enumerate(state.parts):
        if part.skip:
            out = sum(stop - start for start, stop in part.skip)
            yield f"skipped from part {number} on: {count(out, 'sample')}: {ranges_text(part.skip)}"
        if part.epoch is not None and number:
            yield f"part {number} starts epoch {part.epoch}"


def _course_values(saved: SavedState, tracing: Tracing) -> dict[str, Any]:
    """Returns the same facts as values for --json."""
    facts, state, steps = tracing.facts, (saved.sequences or saved.state).to_dict(), tracing.steps
    trained = {"steps": steps.trained if steps.unknown is None else None, "consumed": saved.state.consumed}
    reached = {"epochs": [tracing.epochs[0], tracing.epochs[-1]], "total": tracing.total}
    blend = None if saved.member is None else saved.member.blend.to_dict()
    stream = {"published": facts.samples, "retired": facts.retired}
    return {"state": state, "file": str(saved.file), **trained, **reached, **stream, "blend": blend}


def _fate_line(fate: Fate, tracing: Tracing) -> str:
    """Returns the fate of a sample in an epoch as text."""
    if fate.became == "not published":
        return "not published yet"
    where, epoch = f"(part {fate.part}, position {fate.position})", f"epoch {fate.epoch}"
    at = "" if fate.step is None else f" at step {fate.step + 1}"
    if fate.rank is None:
        undrawn = {
            "to come": "to come; the step is known once more is published",
            "skipped": f"skipped on purpose from part {fate.part} on",
            "left out": "not trained: its stream is no longer in the blend",
            "left over": "left over at the end of the epoch, where less than a batch per rank is left",
            "cut short": "not trained: the next epoch was started before this one ended",
            "in no sequence": "not trained: it has no tokens, or more than fit into a sequence",
            "before": "trained or left out: its chunk is deleted, so its sequence cannot be computed",
            "other split": _other_split(fate.sample, tracing.split),
            "beyond the end": f"not trained: it is beyond max_total_samples = {tracing.state.max_total_samples}",
        }
        return f"{epoch}: {undrawn[fate.became]}"
    if fate.became == "trained":
        unknown = "; the state does not record the step" if fate.step is None else ""
        return f"{epoch}: trained{at} by rank {fate.rank} {where}{unknown}"
    if fate.became == "skipped":
        return f"{epoch}: skipped on purpose: drawn by rank {fate.rank} {where} in skipped steps"
    whole = tracing.fewer_than_step(fate)
    few = f"its epoch has fewer samples left than the {whole or 0:,} of that step: left over if training stops there"
    more = "" if whole is None else f"; {few}"
    return f"{epoch}: to come{at}, on rank {fate.rank}, if the run continues unchanged {where}{more}"


def _other_split(sample: int, split: SplitOf | None) -> str:
    owner = "" if split is None else split_table(split).owner(sample)
    return f"not trained: it belongs to {owner}, the run draws {split}"


def _fate_values(fate: Fate, tracing: Tracing) -> dict[str, Any]:
    """Returns the fate of a sample in an epoch as values for --json."""
    chunk, row = divmod(fate.sample, tracing.facts.samples_per_chunk)
    values = fate._asdict() | {"step": None if fate.step is None else fate.step + 1, "chunk": chunk, "row": row}
    told = {"became": fate.became, "deleted": chunk < tracing.facts.retired}
    return {name: values[name] for name in _COLUMNS} | told


def ranges_text(ranges: Sequence[Sequence[int]], shown: int = 8) -> str:
    """Returns half-open ranges as text, with the first and the last number of each.

    >>> ranges_text([(3, 4), (7, 10)]), ranges_text([(i, i + 1) for i in range(0, 20, 2)], 2)
    ('3, 7 to 9', '0, 2 and 8 more ranges')
    """
    text = ", ".join(f"{a}" if b == a + 1 else f"{a} to {b - 1}" for a, b in ranges[:shown])
    return text if len(ranges) <= shown else f"{text} and {len(ranges) - shown} more ranges"
