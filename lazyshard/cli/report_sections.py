"""The parts of a report's page that tell of the rows: lengths, packing, balance and shuffle, as pictures and tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from lazyshard.cli.output import count
from lazyshard.cli.report_advice import percent
from lazyshard.cli.report_drawing import Bar, Mark, band, bars, columns
from lazyshard.cli.report_svg import escape
from lazyshard.inspection.inspection_balance import BalanceReport
from lazyshard.inspection.inspection_shuffle import ShuffleReport
from lazyshard.inspection.report_facts import ReportFacts
from lazyshard.inspection.report_packing import Packing
from lazyshard.inspection.row_facts import Lengths

__all__ = ["balance_part", "figure", "legend", "lengths_part", "packing_part", "pictures", "shuffle_part", "table"]

_SHARES: Final = (("median", 0.5), ("p90", 0.9), ("p99", 0.99))

_LONG_CELL: Final = 30

_TOLD_BY: Final = {
    "option": "as asked for",
    "producer": "those for which the stream was dealt",
    "nobody": "an assumption",
}


def figure(title: str, picture: str, under: str = "") -> str:
    """Returns a picture with its title, and HTML under it."""
    return f"<figure><h3>{escape(title)}</h3>{picture}{under}</figure>"


def caption(text: str) -> str:
    """Returns a line under a picture."""
    return f"<figcaption>{escape(text)}</figcaption>"


def legend(entries: Sequence[tuple[str, str]]) -> str:
    """Returns what colours mean, each a class and a name."""
    items = "".join(f'<li><i class="{kind}"></i>{escape(name)}</li>' for kind, name in entries)
    return f'<ul class="legend">{items}</ul>'


def pictures(figures: Sequence[str]) -> str:
    """Returns figures beside each other, where there is room."""
    return f'<div class="pictures">{"".join(figures)}</div>' if figures else ""


def table(heads: Sequence[str], rows: Sequence[Sequence[str]], numbers: Sequence[int] = ()) -> str:
    """Returns a table; columns with a number in `numbers` are put to the right, long cells are broken."""
    top = "".join(f"<th>{escape(head)}</th>" for head in heads)
    body = "".join(
        f"<tr>{''.join(_cell(cell, index in numbers) for index, cell in enumerate(row))}</tr>" for row in rows
    )
    return f'<div class="scroll"><table><tr>{top}</tr>{body}</table></div>'


def _cell(text: str, number: bool) -> str:
    kind = ' class="number"' if number else ' class="text"' if len(text) > _LONG_CELL else ""
    return f"<td{kind}>{escape(text)}</td>"


def lengths_part(facts: ReportFacts) -> str:
    """Returns histograms: in tokens where these are known, and in bytes."""
    chunks = facts.chunks
    shown = [("tokens", chunks.tokens), ("bytes", chunks.lengths)]
    figures = [
        figure(f"Rows by length in {unit}", _histogram(lengths, unit), caption(_figures(lengths)))
        for unit, lengths in shown
        if lengths.count
    ]
    return pictures(figures)


def _histogram(lengths: Lengths, unit: str) -> str:
    bins = lengths.histogram()
    marks = [Mark(lengths.quantile(share), name) for name, share in _SHARES]
    edges = [*(one.low for one in bins), bins[-1].high]
    return columns([one.count for one in bins], edges, marks, f"how many rows have which length in {unit}")


def _figures(lengths: Lengths) -> str:
    shares = ", ".join(f"{name} {lengths.quantile(share):,}" for name, share in _SHARES)
    return (
        f"{count(lengths.count, 'row')} looked at: least {lengths.smallest:,}, {shares}, largest {lengths.largest:,}; "
        f"mean {lengths.mean:,.0f}. Columns further right span more lengths."
    )


def packing_part(packing: Packing | None) -> str:
    """Returns how full sequences are, and for rows as they are micro batches before and after, and padding."""
    if packing is None:
        return ""
    full = figure(
        f"How full {'packs' if packing.form in (None, 'pack') else 'sequences'} of {packing.size:,} tokens are",
        band(
            [
                (packing.filled, "a", f"tokens: {percent(packing.filled)}"),
                (1 - packing.filled, "empty", f"empty: {percent(1 - packing.filled)}"),
            ],
            f"{percent(packing.filled)} filled with tokens",
        ),
        legend(
            [("a", f"tokens {percent(packing.filled)}"), ("empty", f"empty or padding {percent(1 - packing.filled)}")]
        ),
    )
    if packing.form is not None:
        return pictures([full])
    fit = packing.rows - packing.too_long
    which = "as asked for" if packing.given else "the power of two that holds the longest row"
    steps = figure(
        "Micro batches of one sequence",
        bars(
            [Bar("rows as they are", fit, f"{fit:,}", "soft"), Bar("packed", packing.packs, f"{packing.packs:,}")],
            "how many micro batches these rows make",
        ),
        caption(f"Of {count(packing.rows, 'row')} looked at; {packing.size:,} tokens are {which}."),
    )
    padded = figure(
        "Padding without packing",
        bars(
            [
                Bar(f"{count(rows, 'row')} in a micro batch", share, percent(share), "b")
                for rows, share in packing.padding
            ],
            "share of a micro batch that is padding",
        ),
        caption("Where each row is padded to the longest of its micro batch."),
    )
    return pictures([steps, padded, full])


def balance_part(facts: ReportFacts) -> str:
    """Returns how long steps take, over even ones."""
    found, training = facts.balance, facts.training
    if found is None:
        return ""
    who = _TOLD_BY.get(training.told_by, f"those of {training.told_by}")
    figures = [_balance(found, "micro batch", training.micro_batch_size)]
    if facts.balance_of_steps is not None:
        figures.append(_balance(facts.balance_of_steps, "global batch", training.rank_step_samples or 1))
    cost = f"{found.training.cost.per_token:g} · tokens + {found.training.cost.per_token_squared:g} · tokens²"
    note = (
        f"{count(training.ranks, 'rank')}: {who}. {count(found.looked_at, 'row')} looked at; a row costs {cost}. 1.00 "
        f"is even; 2.00 takes twice as long, since every rank waits for the slowest."
    )
    return pictures(figures) + f'<p class="faint">{escape(note)}</p>'


def _balance(found: BalanceReport, what: str, rows: int) -> str:
    shown = []
    for one in found.ranks:
        ranks = count(one.ranks, "rank")
        dealt = f"dealt by cost for {count(found.training.ranks, 'rank')}"
        for name, kind, even in (("as it is", "a", one.as_it_is), (dealt, "c", one.dealt)):
            if even is not None:
                worst = f"{even.overall:.2f}, worst step {even.worst:.2f}"
                shown.append(Bar(f"{ranks}, {name}", even.overall, worst, kind))
    title = f"Ranks meet after each {what} of {count(rows, 'sample')} a rank"
    return figure(title, bars(shown, f"{title}: time over that of even ranks", 1.0)) if shown else ""


def shuffle_part(found: ShuffleReport | None, now: int | None) -> str:
    """Returns how far apart neighbours are, window by window.

    Args:
        found: the windows; None where they are not known.
        now: the window with which the stream is read, None where that is not known.
    """
    if found is None:
        return ""
    shown, rows = [], []
    for one in found.windows:
        distance = one.expected.neighbours if one.measured.neighbours is None else one.measured.neighbours
        steps = distance / found.reading.batch_size
        chunk = one.expected.same_chunk if one.measured.same_chunk is None else one.measured.same_chunk
        name = "in order" if one.window == 0 else "all of a rank" if one.window == "all" else f"window {one.window}"
        mine = now is not None and one.window == now
        shown.append(Bar(f"{name}{' (this run)' if mine else ''}", steps, f"{steps:,.1f} steps", "b" if mine else "a"))
        rows.append([name, f"{distance:,.1f}", f"{steps:,.1f}", f"{chunk:.2f} of {found.reading.batch_size}"])
    note = (
        f"{count(found.reading.ranks, 'rank')}, {count(found.reading.batch_size, 'sample')} of each in a step. In "
        f"steps: how many lie between two samples that are neighbours in the stream."
    )
    heads = ("window of a rank, in chunks", "draws between neighbours", "in steps", "of a step from one chunk")
    return (
        pictures([figure("Steps between neighbours of the stream", bars(shown, "steps between neighbours"))])
        + table(heads, rows, (1, 2, 3))
        + f'<p class="faint">{escape(note)}</p>'
    )
