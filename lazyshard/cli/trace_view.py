"""What `lazyshard trace` shows, as lines of text and as values of JSON.

Steps are numbered here as trainers do: the first one is step 1, and `checkpoint-N` comes after step N.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
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
_FIRST: Final = '"byte": '
"""Where what is told of a row begins that is not told of its draw."""


class StepTable:
    """The draws of steps below `stop`, a line each, in columns of a width that is known before the first one."""

    def __init__(self, tracing: Tracing, stop: int) -> None:
        self._per_chunk = tracing.facts.samples_per_chunk
        samples = max(1, tracing.facts.samples)
        parts = tracing.state.parts
        positions = max(max(part.draws for part in parts), stop * max(part.draws_per_step for part in parts))
        most = (
            stop,
            len(parts) - 1,
            max(part.dp for part in parts) - 1,
            positions,
            tracing.epochs[-1] + 1,
            samples - 1,
            (samples - 1) // self._per_chunk,
            self._per_chunk - 1,
        )
        self._widths = [max(len(name), len(str(high))) for name, high in zip(_COLUMNS, most, strict=True)]

    def heading(self) -> str:
        """Returns the line with the names of the columns."""
        return "  ".join(f"{name:>{width}}" for name, width in zip(_COLUMNS, self._widths, strict=True))

    def line(self, drawn: TracedDraw) -> str:
        """Returns the line of a draw."""
        chunk, row = divmod(drawn.sample, self._per_chunk)
        step = "-" if drawn.step is None else drawn.step + 1
        values = (step, drawn.part, drawn.rank, drawn.position, drawn.epoch, drawn.sample, chunk, row)
        text = "  ".join(f"{value:>{width}}" for value, width in zip(values, self._widths, strict=True))
        return text if drawn.became == "trained" else f"{text}  {drawn.became}"


def course_lines(saved: SavedState, tracing: Tracing) -> Iterator[str]:
    """Yields how far a run is, and its parts."""
    state, steps = saved.state, tracing.steps
    told = f" in {count(steps.trained, 'step')}" if steps.unknown is None else ""
    epoch = "" if not state.consumed else f", the last of them in epoch {tracing.epochs[-1]}"
    yield f"{saved.file}: {count(state.consumed, 'sample')} trained{told}{epoch}"
    if saved.member is not None:
        yield _blend_line(saved.member)
    names = ("part", "ranks", "micro batch", "steps", "positions", "samples")
    rows = [names]
    for number, part in enumerate(state.parts):
        first, stop = steps.parts[number].first_step, steps.parts[number].stop_step
        which = "skipped" if not part.trained else f"{first + 1} to {stop}" if stop > first else "none yet"
        if part.trained and not steps.parts[number].known:
            which = "not known"
        rows.append(
            (str(number), str(part.dp), str(part.batch_size), which, str(part.draws), f"{part.dp * part.draws:,}")
        )
    widths = [max(len(row[at]) for row in rows) for at in range(len(names))]
    for row in rows:
        yield "  ".join(f"{text:>{width}}" for text, width in zip(row, widths, strict=True))
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
    if not member.blended:
        return f"of {others}, in which this one is no more; positions and samples below are this stream's"
    return f"of {others}; this one gives {member.share:.2%} now; positions and samples below are this stream's"


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
    drawn, limit = fate.drawn, tracing.state.max_total_samples
    where = "" if drawn is None else f"(part {drawn.part}, position {drawn.position})"
    if fate.became == "trained" and drawn is not None:
        step = "; the state does not say at which step" if drawn.step is None else ""
        at = "" if drawn.step is None else f" at step {drawn.step + 1}"
        text = f"trained{at} by rank {drawn.rank} {where}{step}"
    elif fate.became == "to come" and drawn is not None:
        at = "" if drawn.step is None else f" at step {drawn.step + 1}"
        text = f"to come{at}, on rank {drawn.rank}, if the run goes on as it is {where}"
        if (whole := tracing.fewer_than_step(fate)) is not None:
            text += f"; its epoch has too few left for the {whole:,} of that step: left over, if training stops there"
    elif fate.became == "to come":
        text = "to come; when is certain once more is published"
    elif fate.became == "skipped" and drawn is not None:
        text = f"skipped on purpose: it was rank {drawn.rank}'s {where} among steps that were left out"
    elif fate.became == "skipped":
        text = f"skipped on purpose: left out from part {fate.part} on"
    elif fate.became == "left out":
        text = "not trained: its stream is blended no more"
    elif fate.became == "left over":
        text = "left over at the epoch's end, where less than a batch for every rank is left"
    elif fate.became == "cut short":
        text = "not trained: another epoch was begun before this one was over"
    elif fate.became == "beyond the end":
        text = f"not trained: it lies beyond max_total_samples = {limit}"
    else:
        return "not published yet"
    return f"epoch {fate.epoch}: {text}"


def drawn_values(drawn: TracedDraw, tracing: Tracing) -> dict[str, Any]:
    """Returns a draw as JSON values; `step` is None where it is not known."""
    return _numbered(drawn._asdict(), tracing)


def fate_values(fate: Fate, tracing: Tracing) -> dict[str, Any]:
    """Returns what became of a sample in an epoch as JSON values: as of a draw, with None for what there is not."""
    names = ("step", "part", "rank", "position")
    drawn = {name: None if fate.drawn is None else getattr(fate.drawn, name) for name in names}
    if fate.part is not None:
        drawn["part"] = fate.part
    values = _numbered(drawn | {"epoch": fate.epoch, "sample": fate.sample, "became": fate.became}, tracing)
    return values | {"fewer_than_step": tracing.fewer_than_step(fate)}


def origins_text(origins: tuple[Origin, ...]) -> str:
    """Returns in words where a row may have come from."""
    return " or ".join(map(str, origins)) or _NO_ORIGIN


def origins_values(origins: tuple[Origin, ...]) -> list[dict[str, Any]]:
    """Returns the same as JSON values: `lines` are those that the row equals, `among` leaves out its end."""
    return [
        {"path": one.path, "lines": list(one.lines), "among": None if one.among is None else list(one.among)}
        | {"why": one.why}
        for one in origins
    ]


def with_row(values: dict[str, Any], row: ShownRow | None) -> str:
    """Returns values of JSON with a row, written digit by digit as it is; null for one that is deleted."""
    if row is None:
        return json.dumps(values | dict.fromkeys(("byte", "bytes", "tokens", "value")))
    text = row_text(row)
    return f"{json.dumps(values)[:-1]}, {text[text.index(_FIRST) :]}"


def ranges_text(ranges: tuple[tuple[int, int], ...] | list[tuple[int, int]], shown: int = 8) -> str:
    """Returns half-open ranges in words, the first and the last number of each.

    >>> ranges_text([(3, 4), (7, 10)]), ranges_text([(i, i + 1) for i in range(0, 20, 2)], 2)
    ('3, 7 to 9', '0, 2 and 8 more ranges')
    """
    text = ", ".join(f"{a}" if b == a + 1 else f"{a} to {b - 1}" for a, b in ranges[:shown])
    return text if len(ranges) <= shown else f"{text} and {len(ranges) - shown} more ranges"


def _numbered(values: dict[str, Any], tracing: Tracing) -> dict[str, Any]:
    chunk, row = divmod(values["sample"], tracing.facts.samples_per_chunk)
    step = values["step"]
    ordered = {"step": None if step is None else step + 1}
    for name in ("part", "rank", "position", "epoch", "sample"):
        ordered[name] = values[name]
    gone = chunk < tracing.facts.retired
    return ordered | {"chunk": chunk, "row": row, "became": values["became"], "deleted": gone}
