"""The page of `lazyshard watch`: the values of `/status.json`, the facts of `lazyshard status`, and the history.

Data of the stream is only inserted as text: Jinja2 escapes it, and invisible characters and those that change the
direction of writing are shown as escapes.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import io
import re
from collections.abc import Iterable, Iterator
from datetime import timezone
from importlib.resources import files
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

from jinja2 import Environment, FunctionLoader, StrictUndefined
from markupsafe import Markup, escape

from lazyshard import __version__
from lazyshard.cli.output import chunk_range, count, duration, moment, one_line, per_second, size
from lazyshard.cli.status import consumer_facts, producer_facts, rate_words, told_words
from lazyshard.cli.status_writers import by_urgency, producer_label
from lazyshard.inspection.inspection import History, rates
from lazyshard.inspection.outlook import ConsumerOutlook, Outlook, make_band
from lazyshard.inspection.row_facts import Lengths

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BEGINNING: Final = '<!doctype html>\n<html lang="en">\n<head>\n<meta name="generator" content="lazyshard watch">\n'
"""The beginning of each page, by which --save recognizes an older page that it may replace."""

_POINTS: Final = 60  # Rates or bins per chart
_STYLE: Final = {"svg.fonttype": "path", "svg.hashsalt": "lazyshard", "legend.frameon": False}
# Colours of text, lines, and the data series "C0" and "C1"
_COLOURS: Final = {
    "light": ("#3b434c", "#d5dae0", "#1d4fc4", "#b36b00"),
    "dark": ("#c3cad3", "#343b45", "#8db4ff", "#e0a040"),
}

Values = dict[str, Any]
Part = Literal["whole", "now", "history"]


class Shown(NamedTuple):
    """A stream's history as the page shows it; `version` changes with it."""

    history: History
    # Data URLs by name and by scheme, "light" or "dark"; None if matplotlib is not installed
    pictures: dict[str, dict[str, str]] | None
    version: int


def _read(name: str) -> str:
    return files("lazyshard.cli").joinpath(name).read_text("utf-8")


def _digest(text: str) -> str:
    """Returns the CSP source expression of an element with this text."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


_SHEET: Final = Markup(_read("watch_page.css"))  # noqa: S704 - ours
_SCRIPT: Final = Markup(_read("watch_page.js"))  # noqa: S704 - ours

POLICY: Final = (
    f"default-src 'none'; script-src {_digest(_SCRIPT)}; style-src {_digest(_SHEET)}; "
    "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
"""The Content-Security-Policy of the live page, which allows only its own script and style."""


def render(part: Part, values: Values, outlook: Outlook | None, shown: Shown | None, *, live: bool = True) -> bytes:
    """Returns the page or a part; without `live` it has no script. `values` holds the status values of `outlook`."""
    status, now = values["status"], Values()
    if status is not None and outlook is not None:
        pairs = zip(status["consumers"], outlook.consumers, strict=True)
        now = {
            "rate": rate_words(outlook, outlook.chunk_rate) or "not known yet",
            "told": told_words(outlook),
            "chunks": [(one["state"], one["first_chunk"], one["stop_chunk"]) for one in status["band"]["stretches"]],
            "producer": producer_facts(outlook) if status["producer"] else [],
            "writers": by_urgency(outlook),
            "made_by": producer_label(outlook).capitalize(),
            "consumers": [(one, _chunks_of(outlook, known), consumer_facts(outlook, known)) for one, known in pairs],
        }
    template = _environment().get_template("watch_page.html")
    return template.render(now, part=part, values=values, status=status, shown=shown, live=live).encode()


@functools.cache
def _environment() -> Environment:
    made = Environment(
        loader=FunctionLoader(_read),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=lambda value: one_line(value) if type(value) is str else value,
    )
    made.filters |= {one.__name__: one for one in (count, clock, moment, tied, duration, size, per_second)}
    made.filters["unit"] = lambda text: text.lstrip("≈ .,0123456789")
    made.filters["percent"] = lambda share: f"{100 * share:.1f} %"
    made.globals |= {"bar": bar, "chunk_range": chunk_range, "rates": rates, "version": __version__}
    made.globals |= {"policy": f"default-src 'none'; style-src {_digest(_SHEET)}; img-src data:"}
    made.globals |= {"style": _SHEET, "script": _SCRIPT, "beginning": Markup(BEGINNING)}  # noqa: S704 - ours
    return made


def bar(stretches: Iterable[tuple[str, float, str]]) -> list[tuple[str, str, str]]:
    """Returns class, width in percent and text of the nonempty parts of a bar, each wide enough to be visible.

    >>> [part[:2] for part in bar([("done", 999_996, ""), ("reading", 4, ""), ("ready", 0, "")])]
    [('done', '99.602'), ('reading', '0.398')]
    """
    parts = [one for one in stretches if one[1] > 0]
    total = sum(amount for _, amount, _ in parts)
    # At least 0.4 %, so that every part is visible
    widths = [max(0.4, 100 * amount / total) for _, amount, _ in parts]
    scale = 100 / sum(widths) if widths else 0.0
    return [(kind, f"{width * scale:.3f}", text) for (kind, _, text), width in zip(parts, widths, strict=True)]


def _chunks_of(outlook: Outlook, one: ConsumerOutlook) -> list[tuple[str, int, int]]:
    """Returns the states of the chunks for a consumer, each with the half-open range of its chunks."""
    band = make_band(outlook.survey.census, (one.consumer,))
    return [(part.state, part.first, part.stop) for part in band.stretches]


def clock(seconds: float) -> str:
    """Returns a time of day in UTC as text, as a number of seconds if it is outside the calendar.

    >>> clock(1700000000.5)
    '22:13:20 UTC'
    """
    return re.sub(r"^\d+-\d\d-\d\d ", "", moment(seconds))


def tied(text: str) -> Markup:
    r"""Returns a text with no-break spaces between numbers and their units.

    >>> tied("5 min 19 s old")
    Markup('5\xa0min 19\xa0s old')
    """
    return Markup(re.sub(r"(?<=\d) (?=[a-zA-Z%])", "\u00a0", escape(one_line(text))))  # noqa: S704 - escaped


def draw(history: History) -> dict[str, dict[str, str]] | None:
    """Returns the charts for which there is data, "course" and "lengths"; None if matplotlib is not installed."""
    try:
        import matplotlib as mpl
    except ModuleNotFoundError as cause:
        if (cause.name or "").partition(".")[0] != "matplotlib":
            raise
        return None
    pictures = dict[str, dict[str, str]]()
    for scheme, (text, line, *colours) in _COLOURS.items():
        texts = ("axes.labelcolor", "xtick.color", "ytick.color", "legend.labelcolor", "text.color")
        style: Any = _STYLE | dict.fromkeys(texts, text) | dict.fromkeys(("axes.edgecolor", "grid.color"), line)
        with mpl.rc_context(style | {"axes.prop_cycle": f"cycler('color', {colours})"}):
            for name, figure in _figures(history):
                drawn = io.BytesIO()
                figure.savefig(drawn, format="svg", transparent=True, metadata={"Date": None})
                data = base64.b64encode(drawn.getvalue()).decode()
                pictures.setdefault(name, {})[scheme] = f"data:image/svg+xml;base64,{data}"
    return pictures


def _figures(history: History) -> Iterator[tuple[str, Figure]]:
    course, found = history.course, history.found
    if found is not None and len(course) > 1 and course[-1].time > course[0].time:
        yield "course", _course(history)
    if found is not None and found.lengths.count:
        yield "lengths", _lengths(found.tokens, "tokens") if found.tokens.count else _lengths(found.lengths, "bytes")


def _course(history: History) -> Figure:
    from matplotlib.dates import AutoDateLocator, ConciseDateFormatter
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.8, 4.0), layout="constrained")
    upper, lower = figure.subplots(2, sharex=True, height_ratios=(3, 2))
    course, pace = history.course, rates(history.course, _POINTS)
    # matplotlib counts time in days.
    upper.plot([one.time / 86400 for one in course], [one.amount for one in course], color="C0", label="published")
    if shown := [one for one in history.trained if course[0].time <= one.updated_at]:
        at, samples = [one.updated_at / 86400 for one in shown], [one.consumed for one in shown]
        label = "in the last checkpoint of a consumer"
        upper.plot(at, samples, linestyle="none", marker="o", color="C1", label=label)
        upper.legend(loc="upper left")
    # More names would overlap.
    for one in shown[:4]:
        name = one_line(one.consumer)
        name = name if len(name) <= 24 else f"{name[:24]}…"
        place: Any = {"xytext": (0, -8), "textcoords": "offset points", "ha": "right", "va": "top"}
        upper.annotate(name, (one.updated_at / 86400, one.consumed), parse_math=False, **place)
    edges = [one.time / 86400 for one in (course[0], *pace)]
    lower.stairs([one.amount for one in pace], edges, fill=True, color="C0", alpha=0.7)
    locator = AutoDateLocator(maxticks=6)  # type: ignore[no-untyped-call, unused-ignore]
    lower.xaxis.set_major_locator(locator)
    form = ConciseDateFormatter(locator, tz=timezone.utc)  # type: ignore[no-untyped-call, unused-ignore]
    lower.xaxis.set_major_formatter(form)
    _label(upper, "", "rows")
    _label(lower, "time (UTC)", "rows/s")
    return figure


def _lengths(lengths: Lengths, unit: str) -> Figure:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.8, 3.3), layout="constrained")
    axes, bins = figure.subplots(), lengths.spread(_POINTS)
    edges = [bins[0].low, *(one.high for one in bins)]
    axes.stairs([one.count for one in bins], edges, fill=True, color="C0", alpha=0.7)
    for name, share, line in (("median", 0.5, "-"), ("p90", 0.9, "--"), ("p99", 0.99, ":")):
        at = lengths.quantile(share)
        axes.axvline(at, color="C1", linewidth=1.2, linestyle=line, label=f"{name} {at:,}")
    axes.set_xlim(left=0)
    axes.locator_params(axis="x", nbins=6, integer=True)
    axes.xaxis.set_major_formatter("{x:,.0f}")
    _label(axes, f"row length in {unit}", "rows looked at")
    axes.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=3)
    return figure


def _label(axes: Axes, below: str, beside: str) -> None:
    axes.set(xlabel=below, ylabel=beside, ylim=(0, None))
    axes.locator_params(axis="y", nbins=5)
    axes.yaxis.set_major_formatter("{x:,.10g}")
    axes.set_axisbelow(True)
    axes.grid(axis="y")
    axes.spines[["top", "right"]].set_visible(False)
