"""What `scripts/bench_loaders` says of what it found: ratios, tables in Markdown, and what is worse than asked for."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any, Final

from scripts.benchmarks.bench_loaders_cases import CASES, IN_WORKERS
from scripts.benchmarks.bench_loaders_peers import FLOOR, OURS, Loader, Taken
from scripts.benchmarks.bench_loaders_rounds import Found, Key

ASKED_IN_ORDER: Final = {"A": 0.85, "B": 0.9}
"""Of the speed of the floor, one process, in order."""

ASKED_SHUFFLED: Final = 0.8
"""Of our own speed in order."""

MARGIN: Final = 0.03
"""Loaders are not told apart by less than this part of the speed: repeated runs differ by as much."""


def ratios(base: Sequence[Taken], values: Sequence[Taken]) -> list[float]:
    """Returns how many times as fast each of the values is as the base of the same round."""
    return [one.seconds / other.seconds for one, other in zip(base, values, strict=True)]


def summary(found: Found, key: Key) -> dict[str, Any]:
    """Returns the medians of one loader in one case, for JSON."""
    values = found.taken[key]
    of_floor = ratios(found.taken[key._replace(name=FLOOR)], values)
    median = {name: statistics.median(getattr(one, name) for one in values) for name in values[0].__dataclass_fields__}
    return {
        "data": key.which,
        "case": key.case,
        "loader": key.name,
        "rows_a_second": 1 / median["seconds"],
        "us_a_row": median["seconds"] * 1e6,
        "first_ms": median["first_s"] * 1e3,
        "processor_us_a_row": median["processor_s"] * 1e6,
        "ratio": statistics.median(of_floor),
        "ratios": of_floor,
        "pss_mb": median["pss_mb"],
        "anonymous_mb": median["anonymous_mb"],
    }


def case_table(found: Found, which: str, case: str, names: Sequence[str]) -> list[str]:
    """Returns the lines of a Markdown table of one case, the fastest first."""
    lines = [summary(found, Key(which, case, name)) for name in names if Key(which, case, name) in found.taken]
    table = [
        f"| {which}: {CASES[case]} | rows/s | ratio to the floor | first: ms | processor time: us a row | PSS: MB "
        "| anonymous |",
        "|---|---|---|---|---|---|---|",
    ]
    for line in sorted(lines, key=lambda line: -line["ratio"]):
        spread = f"{line['ratio']:.3g} ({min(line['ratios']):.3g} to {max(line['ratios']):.3g})"
        name = f"**{OURS}**" if line["loader"] == OURS else line["loader"]
        cells = [f"{line['rows_a_second']:,.0f}", spread, f"{line['first_ms']:,.1f}"]
        cells += [f"{line['processor_us_a_row']:,.1f}", f"{line['pss_mb']:,.0f}", f"{line['anonymous_mb']:,.0f}"]
        table.append(f"| {name} | {' | '.join(cells)} |")
    return table


def ratio_table(found: Found, which: str, cases: Sequence[str], names: Sequence[str]) -> list[str]:
    """Returns the lines of a Markdown table of all cases: ratios to the floor."""
    table = [
        f"| {which}: ratio to the floor | {' | '.join(CASES[case] for case in cases)} |",
        "|---" * len(cases) + "|---|",
    ]
    for name in names:
        keys = [Key(which, case, name) for case in cases]
        cells = [f"{summary(found, key)['ratio']:.3g}" if key in found.taken else "" for key in keys]
        if any(cells):
            table.append(f"| {f'**{name}**' if name == OURS else name} | {' | '.join(cells)} |")
    return table


def loader_table(loaders: Sequence[Loader], versions: dict[str, str], found: Found) -> list[str]:
    """Returns the lines of a Markdown table of what was compared."""
    data = sorted({which for which, _ in found.conversions})
    table = [f"| loader | version | settings |{''.join(f' conversion of {which} |' for which in data)}"]
    table.append("|---" * (3 + len(data)) + "|")
    for loader in loaders:
        if loader.name not in found.left_out:
            took = [found.conversions.get((which, loader.native)) for which in data]
            cells = "".join(f" {one[0]:,.1f} s, {one[1]:,.0f} MB |" if one else " none |" for one in took)
            table.append(f"| {loader.name} | {versions[loader.name]} | {loader.settings} |{cells}")
    return table


def worse(found: Found, loaders: Sequence[Loader]) -> list[str]:
    """Returns, in words, where we are behind another loader, or below what is asked for; medians count.

    Of B in one process only a part of the floor is asked for: who has no JSON to parse there is ahead of it.
    """
    lines = []
    for key, values in found.taken.items():
        if key.name != OURS:
            continue
        where = f"{key.which}, {CASES[key.case]}"
        if key.case == "order":
            ratio = statistics.median(ratios(found.taken[key._replace(name=FLOOR)], values))
            if ratio < ASKED_IN_ORDER[key.which]:
                lines.append(f"{where}: {ratio:.2f} of the floor, asked for: {ASKED_IN_ORDER[key.which]} or more")
        in_order = found.taken.get(key._replace(case="order"))
        if key.case == "shuffled" and in_order:
            ratio = statistics.median(ratios(in_order, values))
            if ratio < ASKED_SHUFFLED:
                lines.append(f"{where}: {ratio:.2f} of our speed in order, asked for: {ASKED_SHUFFLED} or more")
        if key.which == "B" and key.case not in IN_WORKERS:
            continue
        for loader in loaders:
            theirs = found.taken.get(key._replace(name=loader.name))
            if theirs and not loader.reference and loader.name != OURS:
                ratio = statistics.median(ratios(theirs, values))
                if ratio < 1 - MARGIN:
                    lines.append(f"{where}: behind {loader.name}, {ratio:.2f} of its speed")
    return lines
