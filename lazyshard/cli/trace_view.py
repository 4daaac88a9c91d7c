"""What `lazyshard trace` shows, as lines of text and as values of JSON.

Steps are numbered here as trainers do: the first one is step 1, and `checkpoint-N` comes after step N.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any, Final

from lazyshard.cli.inspect_view import row_text
from lazyshard.cli.output import count
from lazyshard.inspection.inspection import ShownRow
from lazyshard.inspection.tracing import Fate, TracedDraw, Tracing
from lazyshard.inspection.tracing_sources import Origin
from lazyshard.inspection.tracing_states import Member, SavedState

_COLUMNS: Final = ("step", "part", "rank", "position", "epoch", "sample", "chunk", "row")
_NO_ORIGIN: Final = (
    "a source that is not known: its chunk or the one before it is deleted, or its block is published in part so far"
)
_FIRST: Final = '"byte": '  # Where what is told of a row begins that is not told of its draw


class StepTable:
    """The draws of steps below `stop`, a line each, in columns of a width that is known before the first one."""

    def __init__(self, tracing: Tracing, stop: int) -> None:
        self._tracing = tracing
        each = tracing.facts.samples_per_chunk
        last = max(0, tracing.facts.samples - 1)
        parts = tracing.state.parts
        positions = max(max(part.draws for part in parts), stop * max(part.draws_per_step for part in parts))
        ranks = max(part.dp for part in parts) - 1
        most = (stop, len(parts) - 1, ranks, positions, tracing.epochs[-1] + 1, last, last // each, each - 1)
        self._widths = [max(len(name), len(str(high))) for name, high in zip(_COLUMNS, most, strict=True)]

    def heading(self) -> str:
        """Returns the line with the names of the columns."""
        return _aligned(_COLUMNS, self._widths)

    def line(self, drawn: TracedDraw) -> str:
        """Returns the line of a draw."""
        values = drawn_values(drawn, self._tracing)
        text = _aligned(["-" if values[name] is None else str(values[name]) for name in _COLUMNS], self._widths)
        return text if drawn.became == "trained" else f"{text}  {drawn.became}"


def _aligned(texts: Sequence[str], widths: Sequence[int]) -> str:
    return "  ".join(f"{text:>{width}}" for text, width in zip(texts, widths, strict=True))


def course_lines(saved: SavedState, tracing: Tracing) -> Iterator[str]:
    """Yields how far a run is, and its parts."""
    state, steps = saved.state, tracing.steps
    told = f" in {count(steps.trained, 'step')}" if steps.unknown is None else ""
    epoch = "" if not state.consumed else f", the last of them in epoch {tracing.epochs[-1]}"
    yield f"{saved.file}: {count(state.consumed, 'sample')} trained{told}{epoch}"
    if saved.member is not None:
        yield _blend_line(saved.member)
    rows: list[tuple[str, ...]] = [("part", "ranks", "micro batch", "steps", "positions", "samples")]
    for number, part in enumerate(state.parts):
        own = steps.parts[number]
        which = f"{own.first_step + 1} to {own.stop_step}" if own.stop_step > own.first_step else "none yet"
        if not part.trained or not own.known:
            which = "not known" if part.trained else "skipped"
        rows.append(
            (str(number), str(part.dp), str(part.batch_size), which, str(part.draws), f"{part.dp * part.draws:,}")
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield _aligned(row, widths)
    for number, part in enumerate(state.parts):
        if part.skip:
            out = sum(stop - start for start, stop in part.skip)
            yield f"left out from part {number} on: {count(out, 'sample')}: {ranges_text(part.skip)}"
        if part.epoch is not None and number:
            yield f"part {number} begins epoch {part.epoch}"


def _blend_line(member: Member) -> str:
    """Returns what part a stream has in the blend that the run is over."""
    blend = member.blend
    others = f"a blend of {count(len(blend.parts[-1].members), 'stream')}, {count(blend.consumed, 'sample')} of all"
    own = f"; this one gives {member.share:.2%} now" if member.blended else ", in which this one is no more"
    return f"of {others}{own}; positions and samples below are this stream's"


def course_values(saved: SavedState, tracing: Tracing) -> dict[str, Any]:
    """Returns the same as JSON values."""
    return {
        "state": saved.state.to_dict(),
        "file": str(saved.file),
        "steps": tracing.steps.trained if tracing.steps.unknown is None else None,
        "consumed": saved.state.consumed,
        "epochs": [tracing.epochs[0], tracing.epochs[-1]],
        "total": tracing.total,
        "published": tracing.facts.samples,
        "retired": tracing.facts.retired,
        "blend": None if saved.member is None else saved.member.blend.to_dict(),
    }


def fate_line(fate: Fate, tracing: Tracing) -> str:
    """Returns what became of a sample in an epoch."""
    return "not published yet" if fate.became == "not published" else f"epoch {fate.epoch}: {_fate_text(fate, tracing)}"


def _fate_text(fate: Fate, tracing: Tracing) -> str:
    drawn = fate.drawn
    if drawn is not None:
        where = f"(part {drawn.part}, position {drawn.position})"
        at = "" if drawn.step is None else f" at step {drawn.step + 1}"
        if fate.became == "trained":
            unknown = "; the state does not say at which step" if drawn.step is None else ""
            return f"trained{at} by rank {drawn.rank} {where}{unknown}"
        if fate.became == "skipped":
            return f"skipped on purpose: it was rank {drawn.rank}'s {where} among steps that were left out"
        text = f"to come{at}, on rank {drawn.rank}, if the run goes on as it is {where}"
        if (whole := tracing.fewer_than_step(fate)) is not None:
            text += f"; its epoch has too few left for the {whole:,} of that step: left over, if training stops there"
        return text
    return {
        "to come": "to come; when is certain once more is published",
        "skipped": f"skipped on purpose: left out from part {fate.part} on",
        "left out": "not trained: its stream is blended no more",
        "left over": "left over at the epoch's end, where less than a batch for every rank is left",
        "cut short": "not trained: another epoch was begun before this one was over",
        "beyond the end": f"not trained: it lies beyond max_total_samples = {tracing.state.max_total_samples}",
    }[fate.became]


def drawn_values(drawn: TracedDraw, tracing: Tracing) -> dict[str, Any]:
    """Returns a draw as JSON values; `step` is None where it is not known."""
    each = tracing.facts.samples_per_chunk
    values = drawn._asdict() | {"step": None if drawn.step is None else drawn.step + 1}
    became, chunk = values.pop("became"), drawn.sample // each
    deleted = chunk < tracing.facts.retired
    return values | {"chunk": chunk, "row": drawn.sample % each, "became": became, "deleted": deleted}


def fate_values(fate: Fate, tracing: Tracing) -> dict[str, Any]:
    """Returns what became of a sample in an epoch as JSON values: as of a draw, with None for what there is not."""
    drawn = fate.drawn or TracedDraw(None, 0, 0, 0, fate.epoch, fate.sample, fate.became)
    values = drawn_values(drawn._replace(became=fate.became), tracing)
    if fate.drawn is None:
        values |= dict.fromkeys(("part", "rank", "position"))
    if fate.part is not None:
        values["part"] = fate.part
    return values | {"fewer_than_step": tracing.fewer_than_step(fate)}


def origins_text(origins: tuple[Origin, ...]) -> str:
    """Returns in words where a row may have come from."""
    return " or ".join(map(str, origins)) or _NO_ORIGIN


def origins_values(origins: tuple[Origin, ...]) -> list[dict[str, Any]]:
    """Returns the same as JSON values: `lines` are those that the row equals, `among` leaves out its end."""
    return [asdict(one) for one in origins]


def with_row(values: dict[str, Any], row: ShownRow | None) -> str:
    """Returns values of JSON with a row, written digit by digit as it is; null for one that is deleted."""
    if row is None:
        return json.dumps(values | dict.fromkeys(("byte", "bytes", "tokens", "value")))
    text = row_text(row)
    return f"{json.dumps(values)[:-1]}, {text[text.index(_FIRST) :]}"


def ranges_text(ranges: Sequence[Sequence[int]], shown: int = 8) -> str:
    """Returns half-open ranges in words, the first and the last number of each.

    >>> ranges_text([(3, 4), (7, 10)]), ranges_text([(i, i + 1) for i in range(0, 20, 2)], 2)
    ('3, 7 to 9', '0, 2 and 8 more ranges')
    """
    text = ", ".join(f"{a}" if b == a + 1 else f"{a} to {b - 1}" for a, b in ranges[:shown])
    return text if len(ranges) <= shown else f"{text} and {len(ranges) - shown} more ranges"
