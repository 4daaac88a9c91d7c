"""What `lazyshard inspect --balance` shows, as lines of text and for `--json`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from lazyshard.cli.output import count
from lazyshard.inspection.inspection_balance import BalanceReport, RanksReport
from lazyshard.plan.balance import Evenness

_MEANINGS: Final = (
    ("overall", "the largest costs of all steps over the means: how much longer training takes than with even ranks"),
    ("mean", "the largest cost of a rank in a step over the mean of the ranks, in the mean of the steps"),
    ("p99, worst", "the same of the step that 99 % do not exceed, and of the worst one"),
)
_MEANING_WIDTH: Final = max(len(name) for name, _ in _MEANINGS)

_HEADS: Final = ("overall", "mean", "p99", "worst")


def balance_lines(directory: Path, found: BalanceReport) -> Iterator[str]:
    """Yields the page of it."""
    training, made = found.training, found.made
    yield str(directory)
    ended = "ended" if found.ended else "published so far"
    yield f"  {count(found.samples, 'sample')} in chunks of {found.samples_per_chunk:,}, {ended}"
    if made is None:
        yield "  not dealt by cost"
    else:
        yield f"  dealt by cost for {count(made.ranks, 'rank')} with micro batches of {made.micro_batch_size:,}"
    cost = f"{training.cost.per_token:g} * tokens + {training.cost.per_token_squared:g} * tokens^2"
    name = "pack" if found.packed else "row"
    whose = "sample of a pack" if found.packed else "row"
    yield f"  micro batches of {count(training.micro_batch_size, name)}; a {whose} costs {cost}"
    yield f"  {_looked_at(found)}"
    yield ""
    groups = [("as it is", [one.as_it_is for one in found.ranks])]
    groups.append(("by chance", [one.by_chance for one in found.ranks]))
    if any(one.dealt is not None for one in found.ranks):
        groups.append((f"dealt for {count(training.ranks, 'rank')}", [one.dealt for one in found.ranks]))
    yield from _table(found.ranks, groups)
    yield ""
    for name, meaning in _MEANINGS:
        yield f"  {name:{_MEANING_WIDTH}}  {meaning}"
    for note in _notes(found):
        yield ""
        yield f"  {note}"


def _looked_at(found: BalanceReport) -> str:
    rows = count(found.looked_at, "row") if found.looked_at < found.samples else "all rows"
    if not found.looked_at:
        return "no row looked at"
    if found.packed:
        return f"{rows} looked at, lengths of their samples from the packs"
    read = found.looked_at - found.from_seals - found.measured
    origins = (
        (found.measured, "as measured since they were sealed"),
        (found.from_seals, "from the seals"),
        (read, f"from the field {found.training.length_field!r}"),
    )
    there = [(number, words) for number, words in origins if number]
    if len(there) == 1:
        return f"{rows} looked at, lengths {there[0][1]}"
    return f"{rows} looked at, lengths of " + ", ".join(f"{number:,} {words}" for number, words in there)


def _table(ranks: tuple[RanksReport, ...], groups: list[tuple[str, list[Evenness | None]]]) -> Iterator[str]:
    rows = [["ranks", "steps"], *([f"{one.ranks:,}", _steps(one.as_it_is)] for one in ranks)]
    widths = [max(len(row[column]) for row in rows) for column in range(2)]
    space = len(_HEADS) * 7 + 2 * (len(_HEADS) - 1)
    left = " " * (sum(widths) + 2)
    yield "  " + (left + "".join(f"    {name:<{space}}" for name, _ in groups)).rstrip()
    for number, row in enumerate(rows):
        line = "  ".join(f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True))
        for _, found in groups:
            cells = _HEADS if not number else _cells(found[number - 1])
            line += "    " + "  ".join(f"{cell:>7}" for cell in cells)
        yield f"  {line}"


def _steps(even: Evenness | None) -> str:
    return "0" if even is None else f"{even.steps:,}"


def _cells(even: Evenness | None) -> tuple[str, ...]:
    if even is None:
        return ("-",) * len(_HEADS)
    return tuple(f"{value:.3f}" for value in (even.overall, even.mean, even.p99, even.worst))


def _notes(found: BalanceReport) -> Iterator[str]:
    size = found.training.micro_batch_size
    if found.samples_per_chunk % size:
        yield (
            f"not dealt: chunks of {found.samples_per_chunk:,} hold no whole micro batches of {size:,}; "
            f"see --samples-per-chunk of lazyshard-producer"
        )
    if found.made is not None:
        yield "a shuffle window puts rows into other steps: read a stream that is dealt by cost without one"


def balance_values(directory: Path, found: BalanceReport) -> dict[str, Any]:
    """Returns it for `--json`."""
    training, made = found.training, found.made
    return {
        "stream": str(directory),
        "samples": found.samples,
        "ended": found.ended,
        "samples_per_chunk": found.samples_per_chunk,
        "dealt_by_cost": None
        if made is None
        else {
            "ranks": made.ranks,
            "micro_batch_size": made.micro_batch_size,
            "length_field": made.length_field,
            "cost_per_token": made.cost_per_token,
            "cost_per_token_squared": made.cost_per_token_squared,
        },
        "micro_batch_size": training.micro_batch_size,
        "cost_per_token": training.cost.per_token,
        "cost_per_token_squared": training.cost.per_token_squared,
        "looked_at": found.looked_at,
        "lengths_from_seals": found.from_seals,
        "lengths_measured": found.measured,
        "packed": found.packed,
        "ranks": [
            {
                "ranks": one.ranks,
                "as_it_is": _values(one.as_it_is),
                "by_chance": _values(one.by_chance),
                "dealt": _values(one.dealt),
            }
            for one in found.ranks
        ],
    }


def _values(even: Evenness | None) -> dict[str, Any] | None:
    return None if even is None else even.values()
