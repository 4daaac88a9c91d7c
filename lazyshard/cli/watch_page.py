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
from dataclasses import dataclass
from importlib.resources import files
from typing import TYPE_CHECKING, Any, Final

from jinja2 import Environment, FunctionLoader, StrictUndefined
from markupsafe import Markup, escape

from lazyshard import __version__
from lazyshard.cli.inspect_view import moment
from lazyshard.cli.output import count, one_line, per_second
from lazyshard.cli.watch_words import bar, chunks, clock, consumer, notice, producer, stream_state, tiles
from lazyshard.inspection.history import History, rates
from lazyshard.inspection.refusals import RefusedFor
from lazyshard.inspection.row_facts import Lengths

if TYPE_CHECKING:
    from lazyshard.cli.watch_pictures import Picture

BEGINNING: Final = '<!doctype html>\n<html lang="en">\n<head>\n<meta name="generator" content="lazyshard watch">\n'
"""How each page begins: a saved one is known by it."""

_STRETCHES: Final = 8
"""Lines of the table of rates."""

_REASONS: Final = 10


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
            "percent": percent,
            "clock": clock,
            "moment": moment,
            "where": where,
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

    def whole(self, values: dict[str, Any], shown: Shown | None, *, live: bool) -> bytes:
        """Returns the page.

        Args:
            values: of `/status.json`.
            shown: the stream's history, None where nothing is known of it yet.
            live: whether it is to change with the stream; one that is saved has no script.
        """
        policy = f"default-src 'none'; style-src '{_digest(self._style)}'; img-src data:"
        return self._render("whole", values, shown, live=live, policy=policy)

    def now(self, values: dict[str, Any], shown: Shown | None) -> bytes:
        """Returns the part of the page that changes with every look."""
        return self._render("now", values, shown, live=True)

    def history(self, values: dict[str, Any], shown: Shown | None) -> bytes:
        """Returns the part of the page with pictures and tables."""
        return self._render("history", values, shown, live=True)

    def _render(self, part: str, values: dict[str, Any], shown: Shown | None, **more: Any) -> bytes:
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
            **more,
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


def where(one: RefusedFor) -> str:
    """Returns where the first row stands that was refused for a reason."""
    others = "" if one.sources == 1 else f", and in {count(one.sources - 1, 'other source')}"
    return f"{one.first.source}, line {one.first.line:,}{others}"


def tied(text: str) -> Markup:
    r"""Returns a text in which no line breaks between an amount and its unit.

    >>> tied("5 min 19 s old")
    Markup('5\xa0min 19\xa0s old')
    """
    return Markup(re.sub(r"(?<=\d) (?=[a-zA-Z%])", "\u00a0", escape(one_line(text))))  # noqa: S704 - escaped


def percent(share: float) -> str:
    """Returns a share in percent.

    >>> percent(0.7004)
    '70.0 %'
    """
    return f"{100 * share:.1f} %"


def _read(name: str) -> str:
    return files("lazyshard.cli").joinpath(name).read_text("utf-8")


def _digest(text: str) -> str:
    """Returns what a policy calls an element with this text by."""
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"
