"""The figures in the JSON lines of the benchmarks, all in one form, and one table of them in Markdown."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

Line = dict[str, Any]
"""What a benchmark appends with `--json`."""


@dataclass(frozen=True)
class Figure:
    """One thing that was measured.

    Attributes:
        plot: the picture that it is drawn in.
        group: what it is compared with there, and of what kind the values are.
        name: what it is called.
        values: one for each round, or the median alone where that is all there is.
        unit: of the values; "x" where they are ratios to the floor of the same round.
        higher: whether more is better.
        ours: whether it is a figure of lazyshard, and not of what it is compared with.
    """

    plot: str
    group: str
    name: str
    values: tuple[float, ...]
    unit: str
    higher: bool = False
    ours: bool = True

    @property
    def median(self) -> float:
        """The median of the values."""
        return statistics.median(self.values)


def _read(line: Line) -> Iterator[Figure]:
    for text, variants in line["reading"].items():
        for one in variants:
            group = f"{text}: speed against orjson.loads alone"
            yield Figure("read", group, one["variant"], tuple(one["ratios"]), "x", True, "floor" not in one["variant"])
    first = tuple(line["first_sample_ms"])
    yield Figure("read", "from construction to the first sample", "LazyShardedDataset", first, "ms")


def _producer(line: Line) -> Iterator[Figure]:
    for group in ("prose", "plain", "gzip", "peers"):
        base = line[group][0]["variant"] if line.get(group) else ""
        for one in line.get(group, ()):
            ours = any(word in one["variant"] for word in ("ChunkWriter", "lazyshard"))
            title = f"{group}: speed against {base}"
            yield Figure("producer", title, one["variant"], tuple(one["clock_ratios"]), "x", True, ours)
    for name, values in line["latency_ms"].items():
        yield Figure("producer", "from the last row of a chunk to a waiting reader", name, tuple(values), "ms")


def _resume(line: Line) -> Iterator[Figure]:
    for one in line.get("first", ()):
        live = ", live" * one["live"] + f", after {one['rescales']} rescales" * bool(one["rescales"])
        name = f"{one['saved']} to {one['ranks']} ranks, window {one['window']}{live}, after {one['consumed']:,}"
        yield Figure("resume", "from construction to the first sample", name, tuple(one["ms"]), "ms")
    for one in line.get("plan", ()):
        name = f"{one['variant']}, end {'known' if one['end_known'] else 'unknown'}"
        yield Figure("resume", "arithmetic, one call", name, tuple(1e6 * s for s in one["scalar_s"]), "us")
        yield Figure("resume", "arithmetic, a sample in arrays", name, tuple(1e9 * s for s in one["vector_s"]), "ns")
    for name, values in line.get("rescale", {}).items():
        yield Figure("resume", "a rescale", name, tuple(1e3 * s for s in values), "ms")
    for one in line.get("peers", ()):
        last = tuple(one["ms"][-1])
        ours = "LazyShardedDataset" in one["loader"]
        yield Figure("resume", "to the first batch late in an epoch", one["loader"], last, "ms", ours=ours)


def _startup(line: Line) -> Iterator[Figure]:
    for name, one in line.items():
        if isinstance(one, dict) and "cost" in one:
            yield Figure("startup", "what the .pth adds to a start", name, tuple(one["cost"]["clock"]), "ms")


def _wait(line: Line) -> Iterator[Figure]:
    for one in line.get("latency", ()):
        yield Figure("wait", "until a waiting reader has a chunk", one["case"], tuple(one["ms"]), "ms")
    for ranks, shares in line.get("idle", {}).items():
        values = tuple(100 * share for share in shares)
        yield Figure("wait", "of a core, each waiting rank", f"{ranks} waiting", values, "%")
    for ranks, counts in line.get("asking", {}).items():
        values = tuple(float(sum(count.values())) for count in counts)
        yield Figure("wait", "calls for names of the stream, all ranks", f"{ranks} waiting", values, "calls")


def _scatter(line: Line) -> Iterator[Figure]:
    for data, found in line.items():
        if isinstance(found, dict) and "measured" in found:
            for one in found["measured"]:
                values = tuple(float(each["slowest"]) for each in one["rounds"])
                name = f"{one['variant']}, {one['ranks']} ranks"
                ours = "lazyshard" in one["variant"].lower()
                yield Figure("scatter", f"{data}: until the last rank has its batch", name, values, "ms", ours=ours)


def _template(line: Line) -> Iterator[Figure]:
    for order, one in line["orders"].items():
        yield Figure("template", "reading, of a worker's time", order, tuple(one["loading_percent"]), "%")


def _loaders(line: Line) -> Iterator[Figure]:
    from scripts.benchmarks.bench_loaders_cases import CASES

    for one in line["results"]:
        # The floor is 1 everywhere, and reading the bytes beyond every scale.
        if one["loader"] not in ("orjson", "bytes"):
            group = f"{one['data']}, {CASES[one['case']]}: speed against orjson.loads alone"
            ours = one["loader"] == "lazyshard"
            yield Figure(f"loaders-{one['data']}", group, one["loader"], tuple(one["ratios"]), "x", True, ours)


def _blend(line: Line) -> Iterator[Figure]:
    for where in ("in order", "windows of 4 chunks"):
        for name, values in line[where].items():
            group = f"{where}: a row in batches of 8, processor time"
            yield Figure("blend", group, name, tuple(values), "us", ours=name != "one stream")
    for name, values in line.items():
        if name.startswith("table of "):
            yield Figure("blend", "to build a table", f"{name.removeprefix('table of ')} streams", tuple(values), "ms")


def _pack(line: Line) -> Iterator[Figure]:
    for name, one in line.items():
        if name.startswith("buffer of "):
            filled = tuple(100 * part for part in one["filled"])
            yield Figure("pack", "of packs that is filled", name, filled, "%", True)
        elif isinstance(one, dict) and "times" in one:
            yield Figure("pack", "to pack one buffer, processor time", name, tuple(one["ms"]), "ms")
            yield Figure("pack", "speed against binpacking", name, tuple(one["times"]), "x", True)


def _balance(line: Line) -> Iterator[Figure]:
    for name, one in line.items():
        if name.startswith("micro batches of "):
            group = f"{name}: largest cost of a rank over the mean"
            for order, way in (("before", "as they come"), ("dealt", "dealt by cost")):
                value = (float(one[order]["overall"]),)
                yield Figure("balance", group, way, value, "x", ours=order == "dealt")
            yield Figure("balance", "to deal a stripe", name, tuple(one["ms"]), "ms")
        elif name.startswith("global batches"):
            for way, found in one.items():
                ours, value = way.startswith("dealt"), (float(found["even"]["overall"]),)
                yield Figure("balance", f"{name}: largest cost of a rank over the mean", way, value, "x", ours=ours)


BENCHMARKS: Final[dict[str, Callable[[Line], Iterator[Figure]]]] = {
    "read": _read,
    "resume": _resume,
    "producer": _producer,
    "startup": _startup,
    "loaders": _loaders,
    "scatter": _scatter,
    "template": _template,
    "wait": _wait,
    "blend": _blend,
    "pack": _pack,
    "balance": _balance,
}
"""The benchmarks by name: `scripts/bench_` and this."""


def figures_of(name: str, line: Line) -> list[Figure]:
    """Returns the figures of one line of a benchmark, as far as they have values.

    Raises:
        ValueError: the line is not of the form that this benchmark writes.
    """
    try:
        return [figure for figure in BENCHMARKS[name](line) if figure.values]
    except (KeyError, TypeError, AttributeError, IndexError) as error:
        raise ValueError(f"bench_{name}: a line that is not of the form that it writes: {error!r}") from error


def number(value: float) -> str:
    """Returns three significant digits, without an exponent."""
    if value == 0 or abs(value) >= 100:
        return f"{value:,.0f}"
    text = f"{value:.3g}"
    return text if "e" not in text else f"{value:.6f}".rstrip("0")


def with_unit(value: float, unit: str) -> str:
    """Returns a number with its unit."""
    return f"{number(value)}{'x' if unit == 'x' else f' {unit}'}"


def markdown(figures: Sequence[Figure]) -> str:
    """Returns one table of all figures."""
    lines = ["| benchmark | figure | of | median | lowest to highest |", "|---|---|---|---|---|"]
    for one in figures:
        name = f"**{one.name}**" if one.ours else one.name
        spread = f"{number(min(one.values))} to {number(max(one.values))}" if len(one.values) > 1 else ""
        lines.append(f"| {one.plot} | {one.group} | {name} | {with_unit(one.median, one.unit)} | {spread} |")
    return "\n".join(lines) + "\n"
