"""The page of `lazyshard watch`: the values of `/status.json`, facts as `lazyshard status` has them, and the history.

`watch_page.html` is its template; `watch_page.js` asks for `/now` and `/history` anew while the page is live. All that
comes from the stream is text: Jinja2 escapes it, and characters that are not seen, or turn the direction of writing,
are shown as escapes.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.resources import files
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

from jinja2 import Environment, FunctionLoader, StrictUndefined
from markupsafe import Markup, escape

from lazyshard import __version__
from lazyshard.cli.output import chunk_range, count, duration, moment, one_line, per_second, size
from lazyshard.cli.status_view import consumer_facts, producer_facts, rate_words, told_words
from lazyshard.inspection.inspection import History, rates
from lazyshard.inspection.outlook import Outlook
from lazyshard.inspection.row_facts import Lengths

if TYPE_CHECKING:
    from lazyshard.cli.watch_pictures import Picture

BEGINNING: Final = '<!doctype html>\n<html lang="en">\n<head>\n<meta name="generator" content="lazyshard watch">\n'
"""How each page begins: a saved one is known by it."""

_STRETCHES: Final = 8  # Lines of the table of rates
_REASONS: Final = 10

STATES: Final = {
    "deleted": ("deleted", "deleted, or being deleted"),
    "done": ("done", "in durable checkpoints of every consumer"),
    "taken": ("read", "read by every consumer, not in a checkpoint of all"),
    "reading": ("being read", "being read now; the number is the rank"),
    "ready": ("ready", "published, and some consumer has not come to it"),
    "awaited": ("awaited", "not published yet, and a consumer needs it"),
}
"""Of each state of a chunk: what it is called, and what it is."""

_KINDS: Final = dict.fromkeys(("waiting", "idle"), "wait") | dict.fromkeys(("dead", "failed"), "bad")
"""How the state of a producer is coloured that is not "good"."""

_SOON_S: Final = 600.0  # A reader that has to wait sooner is warned of, one that is merely quicker than rows is not
_THINNEST: Final = 0.4  # Percent of a band that every stretch has at the least, so that it is seen

Values = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Shown:
    """A stream's history as the page shows it; its `version` is another one where anything of it is."""

    history: History
    pictures: dict[str, Picture] | None  # by name; None where matplotlib is not installed
    version: int


class WatchPage:
    """Makes the page."""

    def __init__(self) -> None:
        environment = Environment(
            loader=FunctionLoader(_read),
            autoescape=True,
            undefined=StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
            finalize=lambda value: one_line(value) if type(value) is str else value,
        )
        environment.filters |= {"count": count, "clock": clock, "moment": moment, "tied": tied}
        environment.filters["percent"] = lambda share: f"{100 * share:.1f} %"
        environment.globals |= {"bar": bar, "version": __version__}
        self._template = environment.get_template("watch_page.html")
        self._style, self._script = Markup(_read("watch_page.css")), Markup(_read("watch_page.js"))  # noqa: S704 - ours

    @property
    def policy(self) -> str:
        """The Content-Security-Policy of the live page: its own script and style work, and nothing else."""
        return (
            f"default-src 'none'; script-src '{_digest(self._script)}'; style-src '{_digest(self._style)}'; "
            f"connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
        )

    def render(
        self,
        part: Literal["whole", "now", "history"],
        values: Values,
        outlook: Outlook | None,
        shown: Shown | None,
        *,
        live: bool = True,
    ) -> bytes:
        """Returns the page, or the part that changes with every look, or the one with pictures and tables.

        `outlook` is what the `status` of the values is made of; `shown` is None where no history is known. One that is
        not `live` is saved, and has no script.
        """
        context = {
            **{"part": part, "values": values, "status": values["status"], "shown": shown, "live": live},
            **{"style": self._style, "script": self._script, "beginning": Markup(BEGINNING)},  # noqa: S704 - ours
            "notice": notice(values),
            "past": None if shown is None else past(shown.history),
            "policy": f"default-src 'none'; style-src '{_digest(self._style)}'; img-src data:",
        }
        return self._template.render(context | _now(values["status"], outlook)).encode()


def _now(status: Values | None, outlook: Outlook | None) -> Values:
    if status is None or outlook is None:
        return dict.fromkeys(("state", "producer", "chunks")) | {"tiles": [], "consumers": []}
    told, state = status["producer"], "ended" if status["ended"] else "live"
    producer = None
    if told is not None:
        state = "ended" if status["ended"] else told["state"]
        facts = [(name, told[field]) for name, field in (("waits for", "waits_for"), ("failure", "failure"))]
        facts = [(name, text) for name, text in facts if text]
        producer = Pill(told["state"], _KINDS.get(told["state"], "good")), [*facts, *producer_facts(outlook)]
    return {
        "state": Pill(state, _KINDS.get(state, "good")),
        "tiles": tiles(status, outlook),
        "chunks": chunks(status),
        "producer": producer,
        "consumers": [
            {
                "name": one["name"],
                "pill": _pill(one),
                "band": bar(_band(status, one)),
                "facts": [*([("problem", one["problem"])] if one["problem"] else []), *consumer_facts(outlook, known)],
                "blend": one["blend"],
            }
            for one, known in zip(status["consumers"], outlook.consumers, strict=True)
        ],
    }


def past(history: History) -> Values:
    """Returns what a stream's history tells as tables: rates, lengths and refused rows."""
    found, reasons = history.found, () if history.refusals is None else history.refusals.reasons
    tokens = found is not None and bool(found.tokens.count)
    lengths = Lengths() if found is None else found.tokens if tokens else found.lengths
    course, stretches, at = history.course, [], 0
    for one in rates(course, _STRETCHES):
        while at + 1 < len(course) and course[at + 1].time <= one.time:
            at += 1
        stretches.append((moment(one.time), f"{course[at].amount:,.0f}", per_second(one.amount, "rows")))
    return {
        "course": stretches,
        "lengths": lengths,
        "unit": "tokens" if tokens else "bytes",
        "bins": lengths.histogram(),
        "reasons": reasons[:_REASONS],
        "other_rows": sum(one.rows for one in reasons[_REASONS:]),
    }


class Pill(NamedTuple):
    """A word on a coloured ground: "good", "wait" or "bad"."""

    text: str
    kind: str


def notice(values: Values) -> str:
    """Returns what is amiss with the looks themselves, "" where nothing is."""
    status, said, since = values["status"], [], values["silent_since_s"]
    if since is not None:
        silent = duration(values["now_s"] - since)
        said.append(f"The stream's storage has given no answer since {clock(since)}, for {silent}.")
    if values["missing"] and status is None:
        said.append("There is no stream here yet. It will be shown as soon as its producer has begun it.")
    elif values["error"]:
        said.append(f"The last look has failed: {values['error'].rstrip('.')}.")
    if status is not None and said:
        said.append(f"What is shown is of {clock(status['looked_at_s'])}.")
    return " ".join(said)


def tiles(status: Values, outlook: Outlook) -> list[tuple[str, str, str, str]]:
    """Returns the figures on top of the page: title, amount, unit, and a line about it."""
    rows = status["published_samples"]
    published = [] if status["samples_per_chunk"] is None or rows is None else [count(rows, "sample")]
    published += [f"{count(status['retired_chunks'], 'chunk')} deleted"] if status["retired_chunks"] else []
    published.append("ended" if status["ended"] else "live")
    disk = "free space not known" if status["free_bytes"] is None else f"{size(status['free_bytes'])} free"
    if status["full_in_s"] is not None:
        disk += f"; full in about {duration(status['full_in_s'])}"
    refused = "" if status["quarantined_rows_is_exact"] else "≈ "
    used = "" if status["used_bytes_is_exact"] else "≈ "
    rate = rate_words(outlook, outlook.chunk_rate) or "not known yet"
    figures = [
        ("Published", count(status["published_chunks"], "chunk"), ", ".join(published)),
        ("Rate", rate, f"published{told_words(outlook)}"),
        ("Until a reader starves", *_supply(status)),
        ("Disk", used + size(status["used_bytes"]), disk),
        ("Quarantine", refused + count(status["quarantined_rows"], "row"), "refused so far"),
    ]
    units = [figure.lstrip("≈ .,0123456789") for _, figure, _ in figures]
    return [
        (title, one.removesuffix(unit), unit, text) for (title, one, text), unit in zip(figures, units, strict=True)
    ]


def _supply(status: Values) -> tuple[str, str]:
    if status["ended"]:
        return "never", "the stream has ended: all is there"
    hungry = [one for one in status["consumers"] if one["starving_in_s"] is not None]
    if not hungry:
        steady = any(one["supply"] == "steady" for one in status["consumers"])
        return ("never", "at these rates") if steady else ("–", "not known: no reading mark, or no rate yet")
    first = min(hungry, key=lambda one: one["starving_in_s"])
    if first["starving_in_s"] == 0:
        return "now", f"{first['name']} waits for {count(-first['ahead_chunks'], 'chunk')}"
    return f"≈ {duration(first['starving_in_s'])}", f"until {first['name']} has to wait"


def bar(stretches: Iterable[tuple[str, float, str]]) -> list[tuple[str, str, str]]:
    """Returns class, percent and meaning of the parts of a bar that are not empty, each wide enough to be seen.

    >>> [part[:2] for part in bar([("done", 999_996, ""), ("reading", 4, ""), ("ready", 0, "")])]
    [('done', '99.602'), ('reading', '0.398')]
    """
    parts = [one for one in stretches if one[1] > 0]
    total = sum(amount for _, amount, _ in parts)
    widths = [max(_THINNEST, 100 * amount / total) for _, amount, _ in parts]
    scale = 100 / sum(widths) if widths else 0.0
    return [(kind, f"{width * scale:.3f}", text) for (kind, _, text), width in zip(parts, widths, strict=True)]


def chunks(status: Values) -> Values:
    """Returns what has become of the chunks: the parts of the band, how many are in each state, and the close-up."""
    band, totals = status["band"], dict.fromkeys(STATES, 0)
    stretches = [(one["state"], one["first_chunk"], one["stop_chunk"]) for one in band["stretches"]]
    for state, first, end in stretches:
        totals[state] += end - first
    cells, stop = band["close_up"], band["stop_chunk"]
    shown = chunk_range(cells[0]["chunk"], cells[-1]["chunk"] + 1) if cells else ""
    return {
        "stop": stop,
        "band": bar(_stretch(*one) for one in stretches),
        "legend": [(state, *STATES[state], total) for state, total in totals.items() if total],
        "title": f"Close up: {shown}" if len(cells) < stop else "One by one",
        "cells": [_cell(one) for one in cells],
        "read": [_sentence(one) for one in cells if one["readers"]],
    }


def _stretch(state: str, first: int, stop: int) -> tuple[str, int, str]:
    return state, stop - first, f"{chunk_range(first, stop)}: {STATES[state][1]}"


def _cell(one: Values) -> tuple[str, str, str]:
    ranks = dict.fromkeys("\u2217" if reader["rank"] is None else str(reader["rank"]) for reader in one["readers"])
    return one["state"], "·".join(ranks) if one["state"] in ("reading", "awaited") else "", _sentence(one)


def _sentence(one: Values) -> str:
    readers = [(reader["consumer"], reader["rank"]) for reader in one["readers"]]
    who = "; ".join(f"{name}, {'shared by its ranks' if rank is None else f'rank {rank}'}" for name, rank in readers)
    return f"chunk {one['chunk']:,}: {STATES[one['state']][0]}" + (f" ({who})" if who else "")


def _pill(one: Values) -> Pill | None:
    if one["problem"]:
        return Pill("problem", "bad")
    if one["supply"] == "shrinking":
        soon = one["starving_in_s"] < _SOON_S
        return Pill(f"has to wait in {duration(one['starving_in_s'])}", "wait" if soon else "good")
    known = {"dry": ("waits for data", "wait"), "steady": ("has enough", "good"), "complete": ("has all", "good")}
    return Pill(*known[one["supply"]]) if one["supply"] in known else None


def _band(status: Values, one: Values) -> Iterable[tuple[str, int, str]]:
    published, done = status["published_chunks"], one["chunks_before"] or 0
    first, stop = one["window_first_chunk"], one["window_stop_chunk"]
    taken = max(done, done if first is None else first)
    read = taken if stop is None or stop > published else max(taken, stop)
    needed = max(published, 0 if status["ended"] else one["needs_chunks"] or 0)
    cuts = [("done", done), ("taken", taken), ("reading", read), ("ready", published), ("awaited", needed)]
    start = 0
    for state, end in cuts:
        if end > start:
            yield _stretch(state, start, end)
        start = max(start, end)


def clock(seconds: float) -> str:
    """Returns a time of day in UTC; of one that no calendar holds the number of seconds.

    >>> clock(1700000000.5)
    '22:13:20 UTC'
    """
    return re.sub(r"^\d+-\d\d-\d\d ", "", moment(seconds))


def tied(text: str) -> Markup:
    r"""Returns a text in which no line breaks between an amount and its unit.

    >>> tied("5 min 19 s old")
    Markup('5\xa0min 19\xa0s old')
    """
    return Markup(re.sub(r"(?<=\d) (?=[a-zA-Z%])", "\u00a0", escape(one_line(text))))  # noqa: S704 - escaped


def _read(name: str) -> str:
    return files("lazyshard.cli").joinpath(name).read_text("utf-8")


def _digest(text: str) -> str:
    """Returns what a policy calls an element with this text by."""
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"
