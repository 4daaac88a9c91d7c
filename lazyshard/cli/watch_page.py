"""The page of `lazyshard watch`: the values of `/status.json`, the facts of `lazyshard status`, and the history.

Data of the stream is only inserted as text: Jinja2 escapes it, and invisible characters and those that change the
direction of writing are shown as escapes. Images are inserted as new ones with the same pixels.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import io
import re
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime, timezone
from importlib.resources import as_file, files
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

from jinja2 import Environment, FunctionLoader, StrictUndefined
from markupsafe import Markup, escape

from lazyshard import __version__
from lazyshard.cli.output import chunk_range, count, duration, moment, one_line, per_second, pretty, size
from lazyshard.cli.status import consumer_facts, producer_facts, rate_words, told_words
from lazyshard.cli.status_writers import by_urgency, producer_label
from lazyshard.errors import LazyShardError
from lazyshard.inspection.inspection import At, History, Overview, rates, read_rows
from lazyshard.inspection.outlook import Outlook, make_band
from lazyshard.inspection.row_facts import Lengths
from lazyshard.inspection.thumbnails import images_in, thumbnail
from lazyshard.stream.stream import open_now

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BEGINNING: Final = '<!doctype html>\n<html lang="en">\n<head>\n<meta name="generator" content="lazyshard watch">\n'
"""The beginning of each page, by which --save recognizes an older page that it may replace."""

_POINTS: Final = 60  # Rates or bins per chart

Values = dict[str, Any]
Part = Literal["whole", "now", "history"]


class Sample(NamedTuple):
    """The newest sample as the page shows it."""

    lines: list[str]  # its text, or why it cannot be read
    images: list[str]  # data URLs, or why there is no thumbnail


class Shown(NamedTuple):
    """A stream's history as the page shows it; `version` changes with it."""

    history: History
    pictures: dict[str, str] | None  # data URLs by name; None if matplotlib is not installed
    version: int
    sample: Sample | None = None


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
    template, status = _environment().get_template("watch_page.html"), values["status"]
    return template.render(part=part, values=values, status=status, outlook=outlook, shown=shown, live=live).encode()


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
    of_outlook = by_urgency, consumer_facts, make_band, producer_facts, producer_label, rate_words, told_words
    made.globals |= {one.__name__: one for one in (bar, chunk_range, rates, *of_outlook)}
    made.globals["version"] = __version__
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


def draw(history: History) -> dict[str, str] | None:
    """Returns the charts for which there is data, "course" and "lengths"; None if matplotlib is not installed."""
    if find_spec("matplotlib") is None:
        return None
    import matplotlib as mpl

    pictures = dict[str, str]()
    with as_file(files("lazyshard.cli").joinpath("watch_page.mplstyle")) as style, mpl.rc_context(fname=style):
        for name, figure in _figures(history):
            drawn = io.BytesIO()
            figure.savefig(drawn, format="svg", transparent=True, metadata={"Date": None})
            pictures[name] = f"data:image/svg+xml;base64,{base64.b64encode(drawn.getvalue()).decode()}"
    return pictures


def newest_sample(found: Overview | None) -> Sample | None:
    """Reads the last sample that was published when the overview was made; None if there is none."""
    if found is None or not found.samples:
        return None
    try:
        [row] = read_rows(open_now(found.directory), *divmod(found.published.samples - 1, found.samples_per_chunk), 1)
    except (LazyShardError, OSError) as error:
        return Sample([str(error)], [])
    return Sample(pretty(row.value, row.line, full=False), [_image(data) for data in images_in(row.value)])


def _image(data: bytes) -> str:
    made, file = thumbnail(data, 160), io.BytesIO()
    if isinstance(made, str):
        return made
    made.save(file, "PNG")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


def _figures(history: History) -> Iterator[tuple[str, Figure]]:
    if (found := history.found) is None:
        return
    if len(found.course) > 1 and found.course[-1].time > found.course[0].time:
        yield "course", _course(found.course, history)
    if found.lengths.count:
        yield "lengths", _lengths(found.tokens, "tokens") if found.tokens.count else _lengths(found.lengths, "bytes")


def _course(course: Sequence[At], history: History) -> Figure:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.8, 4.0))
    upper, lower = figure.subplots(2, sharex=True, height_ratios=(3, 2))
    pace = rates(course, _POINTS)
    upper.plot(_dates(one.time for one in course), [one.amount for one in course], color="C0", label="published")
    if shown := [one for one in history.trained if course[0].time <= one.updated_at]:
        at, samples = _dates(one.updated_at for one in shown), [one.consumed for one in shown]
        label = "in the last checkpoint of a consumer"
        upper.plot(at, samples, linestyle="none", marker="o", color="C1", label=label)
        upper.legend(loc="upper left")
    # More names would overlap.
    for one, date in zip(shown[:4], _dates(one.updated_at for one in shown), strict=False):
        name = one_line(one.consumer)
        name = name if len(name) <= 24 else f"{name[:24]}…"
        place: Any = {"xytext": (0, -8), "textcoords": "offset points", "ha": "right", "va": "top"}
        upper.annotate(name, (date, one.consumed), parse_math=False, **place)
    edges: Any = _dates(one.time for one in (course[0], *pace))
    lower.stairs([one.amount for one in pace], edges, fill=True, color="C0", alpha=0.7)
    _label(upper, "", "rows")
    _label(lower, "time (UTC)", "rows/s")
    return figure


def _dates(seconds: Iterable[float]) -> list[datetime]:
    return [datetime.fromtimestamp(one, timezone.utc) for one in seconds]


def _lengths(lengths: Lengths, unit: str) -> Figure:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.8, 3.3))
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
