"""What `lazyshard inspect --shuffle` shows, as lines of text and for `--json`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from lazyshard.cli.output import count
from lazyshard.inspection.inspection_shuffle import ALL, ShuffleReport, WindowReport

_MEANINGS: Final = (
    ("neighbours", "two samples side by side in the stream: how many samples a rank draws from one to the other"),
    ("drawn in turn", "two samples that a rank draws one after the other: how many samples apart in the stream"),
    ("one chunk", "of a rank's samples in a step, how many lie in the chunk of one of them, itself included"),
)
_MEANING_WIDTH: Final = max(len(name) for name, _ in _MEANINGS)

_HEADS: Final = ("window", "expected", "measured", "in steps", "expected", "measured", "expected", "measured")


def shuffle_lines(directory: Path, found: ShuffleReport) -> Iterator[str]:
    """Yields the page of it."""
    reading = found.reading
    unit = f"{reading.unit}" if isinstance(reading.unit, str) else count(reading.unit, "sample")
    yield str(directory)
    ended = "ended" if found.ended else "published so far"
    yield f"  {count(found.samples, 'sample')} in chunks of {found.samples_per_chunk:,}, {ended}"
    share = "" if found.rank_samples is None else f", {count(found.rank_samples, 'sample')} each in an epoch"
    step = count(reading.batch_size, "sample")
    yield f"  {count(reading.ranks, 'rank')}{share}; dealt by {unit}; a step is {step} a rank"
    yield ""
    rows = [_HEADS, *(_cells(one, reading.batch_size) for one in found.windows)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEADS))]
    # Three groups of columns behind the window, each under a heading and no narrower than that.
    groups = (("neighbours", 1, 4), ("drawn in turn", 4, 6), ("one chunk", 6, 8))
    heading = " " * widths[0]
    for name, first, stop in groups:
        space = sum(widths[first:stop]) + 2 * (stop - first - 1)
        widths[first] += max(0, len(name) - space)
        heading += f"    {name:<{max(len(name), space)}}"
    yield f"  {heading}".rstrip()
    for row in rows:
        line = f"{row[0]:>{widths[0]}}"
        for _, first, stop in groups:
            line += "    " + "  ".join(f"{row[column]:>{widths[column]}}" for column in range(first, stop))
        yield f"  {line}"
    yield ""
    for name, meaning in _MEANINGS:
        yield f"  {name:{_MEANING_WIDTH}}  {meaning}"
    yield from _notes(found)


def _cells(one: WindowReport, batch_size: int) -> tuple[str, ...]:
    expected, measured = one.expected, one.measured
    steps = None if measured.neighbours is None else measured.neighbours / batch_size
    return (
        f"{one.window:,}" if isinstance(one.window, int) else one.window,
        _number(expected.neighbours),
        _number(measured.neighbours),
        _number(steps),
        _number(expected.in_turn),
        _number(measured.in_turn),
        _number(expected.same_chunk),
        _number(measured.same_chunk),
    )


def _number(value: float | None) -> str:
    """Returns a mean with as many digits as it is worth.

    >>> _number(12345.6), _number(2.5), _number(None)
    ('12,346', '2.50', '-')
    """
    if value is None:
        return "-"
    return f"{value:,.0f}" if value >= 1000 else f"{value:.1f}" if value >= 100 else f"{value:.2f}"


def _notes(found: ShuffleReport) -> Iterator[str]:
    notes = []
    if found.largest is not None:
        notes.append(f"neighbours are {found.largest:,} apart at the most: --window {ALL}, all of a rank in one window")
    if missing := [f"{one.window:,}" for one in found.windows if not one.measured.samples]:
        notes.append(f"not measured: {', '.join(missing)}; too little is published for every rank's first window")
    looked = [one.measured.samples for one in found.windows if one.measured.samples]
    drawn = found.reading.ranks * found.rank_samples if found.rank_samples is not None else None
    if drawn is not None and looked and min(looked) < drawn:
        notes.append(f"measured in whole windows of {min(looked):,} samples or more, of {drawn:,}")
    if notes:
        yield ""
        yield from (f"  {note}" for note in notes)


def shuffle_values(directory: Path, found: ShuffleReport) -> dict[str, Any]:
    """Returns it for `--json`."""
    return {
        "stream": str(directory),
        "samples": found.samples,
        "ended": found.ended,
        "samples_per_chunk": found.samples_per_chunk,
        "ranks": found.reading.ranks,
        "unit": found.unit_samples,
        "batch_size": found.reading.batch_size,
        "rank_samples": found.rank_samples,
        "largest_neighbours": found.largest,
        "windows": [_window_values(one, found.reading.batch_size) for one in found.windows],
    }


def _window_values(one: WindowReport, batch_size: int) -> dict[str, Any]:
    return {
        "window": one.window,
        "positions": one.positions,
        "expected": _values(one.expected.neighbours, one.expected.in_turn, one.expected.same_chunk, batch_size),
        "measured": {
            **_values(one.measured.neighbours, one.measured.in_turn, one.measured.same_chunk, batch_size),
            "samples": one.measured.samples,
        },
    }


def _values(
    neighbours: float | None, in_turn: float | None, same_chunk: float | None, batch_size: int
) -> dict[str, float | None]:
    return {
        "neighbours": _rounded(neighbours),
        "neighbours_steps": _rounded(None if neighbours is None else neighbours / batch_size),
        "in_turn": _rounded(in_turn),
        "same_chunk": _rounded(same_chunk),
    }


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 6)
