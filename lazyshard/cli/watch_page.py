"""The text of the page of `lazyshard watch`: the values of `/status.json`, and what a stream's history tells, as HTML.

`watch_page.html` is its template, `watch_page.css` its look, and `watch_page.js` asks for it anew while it is live:

    whole page   /         all of this, with the script
    now          /now      what changes with every look
    history      /history  pictures and tables, which are made anew now and then
    saved        a file    the whole page, without a script

All that comes from the stream is text: Jinja2 escapes it, and characters that are not seen, or turn the direction of
writing, are shown as escapes.
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
from lazyshard.inspection.history import History, rates
from lazyshard.inspection.row_facts import Lengths

if TYPE_CHECKING:
    from lazyshard.cli.watch_pictures import Picture

BEGINNING: Final = '<!doctype html>\n<html lang="en">\n<head>\n<meta name="generator" content="lazyshard watch">\n'
"""How each page begins: a saved one is known by it."""

_STRETCHES: Final = 8
"""Lines of the table of rates."""

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

_KINDS: Final = {
    "running": "good", "finished": "good", "waiting": "wait", "idle": "wait", "dead": "bad", "failed": "bad",
}  # fmt: skip
"""How the state of a producer is coloured."""

_OLD_RATE_S: Final = 10.0
"""What a producer that is silent has told last is not what it does now."""

_SOON_S: Final = 600.0
"""A reader that has to wait within ten minutes is warned of; one that is merely quicker than its producer is not."""

_MARK_S: Final = 600.0
"""A reader whose mark is older has ended, or waits: it reads nothing now."""

_AMOUNT: Final = re.compile(r"([≈\s\d.,]*)(.*)", re.DOTALL)
"""An amount, and its unit."""

_THINNEST: Final = 0.4
"""Percent of a band that every stretch has at the least, so that it is seen."""


@dataclass(frozen=True, slots=True)
class Shown:
    """A stream's history as the page shows it.

    Attributes:
        history: what was found.
        pictures: of it, by name; None where matplotlib is not installed.
        version: other where anything of it is.
    """

    history: History
    pictures: dict[str, Picture] | None
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
        environment.filters |= {
            "count": count,
            "percent": lambda share: f"{100 * share:.1f} %",
            "clock": clock,
            "moment": moment,
            "tied": tied,
        }
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
        values: dict[str, Any],
        shown: Shown | None,
        *,
        live: bool = True,
    ) -> bytes:
        """Returns the page, or the part of it that changes with every look, or the part with pictures and tables.

        Args:
            part: which of these.
            values: of `/status.json`.
            shown: the stream's history, None where nothing is known of it yet.
            live: whether it is to change with the stream; one that is saved has no script.
        """
        status = values["status"]
        context = {
            "part": part,
            "values": values,
            "status": status,
            "style": self._style,
            "script": self._script,
            "notice": notice(values),
            "state": None if status is None else stream_state(status),
            "tiles": [] if status is None else tiles(status),
            "consumers": [] if status is None else [consumer(status, one) for one in status["consumers"]],
            "chunks": None if status is None else chunks(status),
            "producer": None if status is None else producer(status),
            "shown": shown,
            "past": None if shown is None else past(shown.history),
            "beginning": Markup(BEGINNING),  # noqa: S704 - ours
            "live": live,
            "policy": f"default-src 'none'; style-src '{_digest(self._style)}'; img-src data:",
        }
        return self._template.render(context).encode()


def past(history: History) -> dict[str, Any]:
    """Returns what a stream's history tells as tables: rates, lengths and refused rows."""
    found, refusals = history.found, history.refusals
    tokens = found is not None and bool(found.tokens.count)
    lengths = Lengths() if found is None else found.tokens if tokens else found.lengths
    reasons = () if refusals is None else refusals.reasons
    return {
        "native": found is not None,
        "course": [] if found is None else _course(history),
        "lengths": lengths,
        "unit": "tokens" if tokens else "bytes",
        "looked_at": 0 if found is None else found.looked_at,
        "chunks": 0 if found is None else found.chunks,
        "bins": lengths.histogram(),
        "refusals": refusals,
        "reasons": reasons[:_REASONS],
        "other_rows": sum(one.rows for one in reasons[_REASONS:]),
    }


def _course(history: History) -> list[tuple[str, str, str]]:
    """Returns rows of a table: the end of each stretch of time, rows published by then, and their rate before."""
    course = history.course
    found, at = [], 0
    for one in rates(course, _STRETCHES):
        while at + 1 < len(course) and course[at + 1].time <= one.time:
            at += 1
        found.append((moment(one.time), f"{course[at].amount:,.0f}", per_second(one.amount, "rows")))
    return found


class Tile(NamedTuple):
    """A figure in large letters: its title, amount, unit, and a line about it."""

    title: str
    amount: str
    unit: str
    text: str


class Pill(NamedTuple):
    """A word on a coloured ground: "good", "wait" or "bad"."""

    text: str
    kind: str


class BarPart(NamedTuple):
    """A part of a bar: its class, its share in percent, and what it is."""

    kind: str
    percent: str
    title: str


def notice(values: dict[str, Any]) -> str:
    """Returns what is amiss with the looks themselves, "" where nothing is."""
    status, said = values["status"], []
    if values["silent_since_s"] is not None:
        since, silent = values["silent_since_s"], values["now_s"] - values["silent_since_s"]
        said.append(f"The stream's storage has given no answer since {clock(since)}, for {duration(silent)}.")
    if values["missing"] and status is None:
        said.append("There is no stream here yet. It will be shown as soon as its producer has begun it.")
    elif values["error"]:
        said.append(f"The last look has failed: {values['error'].rstrip('.')}.")
    if status is not None and said:
        said.append(f"What is shown is of {clock(status['looked_at_s'])}.")
    return " ".join(said)


def stream_state(status: dict[str, Any]) -> Pill:
    """Returns whether the stream has ended, else what its producer does."""
    state = "ended" if status["ended"] else status["producer"]["state"] if status["producer"] else "live"
    return Pill(state, _KINDS.get(state, "good"))


def tiles(status: dict[str, Any]) -> list[Tile]:
    """Returns the figures on top of the page."""
    rows = status["published_samples"]
    published = [] if status["samples_per_chunk"] is None or rows is None else [count(rows, "sample")]
    published += [f"{count(status['retired_chunks'], 'chunk')} deleted"] if status["retired_chunks"] else []
    published.append("ended" if status["ended"] else "live")
    disk = "free space not known" if status["free_bytes"] is None else f"{size(status['free_bytes'])} free"
    if status["full_in_s"] is not None:
        disk += f"; full in about {duration(status['full_in_s'])}"
    refused = "" if status["quarantined_rows_is_exact"] else "≈ "
    used = "" if status["used_bytes_is_exact"] else "≈ "
    return [
        _tile("Published", count(status["published_chunks"], "chunk"), ", ".join(published)),
        _tile("Rate", rate(status, "published") or "not known yet", f"published{_told(status)}"),
        _tile("Until a reader starves", *_supply(status)),
        _tile("Disk", used + size(status["used_bytes"]), disk),
        _tile("Quarantine", refused + count(status["quarantined_rows"], "row"), "refused so far"),
    ]


def _tile(title: str, figure: str, text: str) -> Tile:
    amount, unit = _AMOUNT.fullmatch(figure).groups()  # type: ignore[union-attr]
    return Tile(title, amount, unit, text)


def _supply(status: dict[str, Any]) -> tuple[str, str]:
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


def rate(one: dict[str, Any], kind: str) -> str | None:
    """Returns a rate, "published" or "read", in samples where they are known; None where it is not."""
    if one[f"{kind}_samples_per_s"] is not None:
        return per_second(one[f"{kind}_samples_per_s"], "samples")
    chunks = one[f"{kind}_chunks_per_s"]
    return None if chunks is None else per_second(chunks, "chunks")


def _told(status: dict[str, Any]) -> str:
    age = status["producer"]["heartbeat_age_s"] if status["producer"] else 0.0
    return f", told {duration(age)} ago" if age > _OLD_RATE_S and status["published_chunks_per_s"] else ""


def bar(stretches: Iterable[tuple[str, float, str]]) -> list[BarPart]:
    """Returns the parts of a bar that are not empty, each wide enough to be seen.

    Args:
        stretches: the class of each, its amount, and what it is.

    >>> [(part.kind, part.percent) for part in bar([("done", 999_996, ""), ("reading", 4, ""), ("ready", 0, "")])]
    [('done', '99.602'), ('reading', '0.398')]
    """
    parts = [one for one in stretches if one[1] > 0]
    total = sum(amount for _, amount, _ in parts)
    widths = [max(_THINNEST, 100 * amount / total) for _, amount, _ in parts]
    scale = 100 / sum(widths) if widths else 0.0
    return [BarPart(kind, f"{width * scale:.3f}", text) for (kind, _, text), width in zip(parts, widths, strict=True)]


def chunks(status: dict[str, Any]) -> dict[str, Any]:
    """Returns what has become of the chunks: the parts of the band, how many are in each state, and the close-up."""
    band, totals = status["band"], dict.fromkeys(STATES, 0)
    stretches = [one for one in band["stretches"] if one["stop_chunk"] > one["first_chunk"]]
    for one in stretches:
        totals[one["state"]] += one["stop_chunk"] - one["first_chunk"]
    cells, stop = band["close_up"], band["stop_chunk"]
    shown = chunk_range(cells[0]["chunk"], cells[-1]["chunk"] + 1) if cells else ""
    return {
        "stop": stop,
        "band": bar((one["state"], one["stop_chunk"] - one["first_chunk"], _stretch(one)) for one in stretches),
        "legend": [(state, *STATES[state], total) for state, total in totals.items() if total],
        "title": f"Close up: {shown}" if len(cells) < stop else "One by one",
        "cells": [_cell(one) for one in cells],
        "read": [_sentence(one) for one in cells if one["readers"]],
    }


def _stretch(one: dict[str, Any]) -> str:
    return f"{chunk_range(one['first_chunk'], one['stop_chunk'])}: {STATES[one['state']][1]}"


def _cell(one: dict[str, Any]) -> tuple[str, str, str]:
    """Returns the class of a cell, what it says, and what it is."""
    ranks = dict.fromkeys("\u2217" if reader["rank"] is None else str(reader["rank"]) for reader in one["readers"])
    return one["state"], "·".join(ranks) if one["state"] in ("reading", "awaited") else "", _sentence(one)


def _sentence(one: dict[str, Any]) -> str:
    readers = [(reader["consumer"], reader["rank"]) for reader in one["readers"]]
    who = "; ".join(f"{name}, {'shared by its ranks' if rank is None else f'rank {rank}'}" for name, rank in readers)
    return f"chunk {one['chunk']:,}: {STATES[one['state']][0]}" + (f" ({who})" if who else "")


def producer(status: dict[str, Any]) -> tuple[Pill, list[tuple[str, str]]] | None:
    """Returns the state of the producer, and what is known of it; None where nothing is."""
    found = status["producer"]
    if found is None:
        return None
    gone = ", not to be seen any more" if found["process_is_gone"] else ""
    gone = ", has ended" if found["process_has_ended"] else gone
    grows = status["growth_bytes_per_s"]
    pairs = [
        ("waits for", found["waits_for"]),
        ("failure", found["failure"]),
        ("process", f"{found['pid']} on {found['host']}{gone}"),
        ("heartbeat", f"{duration(found['heartbeat_age_s'])} old"),
        ("rate", f"{rate(status, 'published') or 'not known yet'}{_told(status)}"),
        ("stream", f"{'grows' if grows > 0 else 'shrinks'} by {size(abs(grows))}/s" if grows else None),
    ]
    return Pill(found["state"], _KINDS.get(found["state"], "wait")), [(name, text) for name, text in pairs if text]


def consumer(status: dict[str, Any], one: dict[str, Any]) -> dict[str, Any]:
    """Returns how a consumer stands: its name, its pill, the parts of its band, facts, and its blend."""
    return {
        "name": one["name"],
        "pill": Pill("problem", "bad") if one["problem"] else _supply_pill(one),
        "band": bar(_band(status, one)),
        "facts": [(name, text) for name, text in _facts(status, one) if text],
        "blend": one["blend"],
    }


def _supply_pill(one: dict[str, Any]) -> Pill | None:
    match one["supply"]:
        case "dry":
            return Pill("waits for data", "wait")
        case "shrinking":
            soon = one["starving_in_s"] < _SOON_S
            return Pill(f"has to wait in {duration(one['starving_in_s'])}", "wait" if soon else "good")
        case "steady":
            return Pill("has enough", "good")
        case "complete":
            return Pill("has all", "good")
    return None


def _band(status: dict[str, Any], one: dict[str, Any]) -> Iterable[tuple[str, int, str]]:
    published, done = status["published_chunks"], one["chunks_before"] or 0
    first, stop = one["window_first_chunk"], one["window_stop_chunk"]
    taken = max(done, done if first is None else first)
    read = taken if stop is None or stop > published else max(taken, stop)
    needed = max(published, 0 if status["ended"] else one["needs_chunks"] or 0)
    cuts = [("done", done), ("taken", taken), ("reading", read), ("ready", published), ("awaited", needed)]
    start = 0
    for state, end in cuts:
        if end > start:
            yield state, end - start, f"{chunk_range(start, end)}: {STATES[state][1]}"
        start = max(start, end)


def _facts(status: dict[str, Any], one: dict[str, Any]) -> Iterable[tuple[str, str | None]]:
    yield "problem", one["problem"]
    first, stop, published = one["window_first_chunk"], one["window_stop_chunk"], status["published_chunks"]
    if first is not None:
        now = f"{chunk_range(first, stop)}, by {count(one['ranks'], 'rank')}"
        if stop <= published:
            # One that has ended still has its mark.
            yield "read last" if one["reading_age_s"] > _MARK_S else "reads now", now
        elif first < published:
            yield "waits for", f"{chunk_range(published, stop)}, to read {now}"
        else:
            yield "waits for", now
    yield "rate", rate(one, "read") or "not known yet"
    ahead = one["ahead_chunks"]
    if ahead is not None:
        supply = f"{count(ahead, 'chunk')} ahead of it" if ahead >= 0 else f"waits for {count(-ahead, 'chunk')}"
        yield "supply", f"{supply}; told {duration(one['reading_age_s'])} ago"
    if one["supply"] == "shrinking":
        yield "has to wait", f"in about {duration(one['starving_in_s'])} at these rates"
    elif one["supply"] in ("dry", "steady"):
        yield "has to wait", "it waits now" if one["supply"] == "dry" else "never at these rates"
    if one["lag_chunks"] is not None:
        lag = [count(one["lag_chunks"], "chunk")]
        lag += [] if one["lag_samples"] is None else [count(one["lag_samples"], "sample")]
        lag += [] if one["lag_s"] is None else [duration(one["lag_s"])]
        yield "lag", ", ".join(lag)
    if one["chunks_before"] is None:
        yield "checkpoint", "none yet"
    else:
        done = f"{count(one['consumed_samples'], 'sample')}, done with {count(one['chunks_before'], 'chunk')}"
        yield "checkpoint", f"{done}; {duration(one['checkpoint_age_s'])} old"


def clock(seconds: float) -> str:
    """Returns a time of day in UTC; of one that no calendar holds the number of seconds.

    >>> clock(1700000000.5)
    '22:13:20 UTC'
    """
    return moment(seconds).partition(" ")[2] if " after " not in moment(seconds) else moment(seconds)


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
