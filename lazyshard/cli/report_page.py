"""A report as one page of HTML: no scripts, no assets, the same wherever it is opened.

The first bytes say that it is a report, so that no other file is ever overwritten by one.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import resources
from typing import Final

from lazyshard import __version__
from lazyshard.cli.inspect_view import moment
from lazyshard.cli.output import count
from lazyshard.cli.report_advice import Change, Finding, in_order
from lazyshard.cli.report_findings import TITLES, findings_of
from lazyshard.cli.report_sections import balance_part, lengths_part, packing_part, shuffle_part
from lazyshard.cli.report_sections_run import damage_part, disk_part, rates_part, refusals_part, waits_part
from lazyshard.cli.report_svg import escape
from lazyshard.inspection.report_facts import ReportFacts

__all__ = ["BEGINNING", "report_page"]

BEGINNING: Final = '<!doctype html>\n<html lang="en">\n<head>\n<meta name="generator" content="lazyshard report">\n'

_HEAD: Final = (
    '<meta charset="utf-8">\n<meta name="viewport" content="width=device-width, initial-scale=1">\n'
    '<meta name="color-scheme" content="light dark">\n'
    # Whatever a name or row of the stream holds, nothing is loaded and nothing is run.
    '<meta http-equiv="Content-Security-Policy" '
    "content=\"default-src 'none'; style-src 'unsafe-inline'; img-src data:\">\n"
    '<link rel="icon" href="data:,">\n'
)

_URGENT: Final = 1.0


def report_page(facts: ReportFacts) -> str:
    """Returns the page."""
    findings = findings_of(facts)
    bodies = _bodies(facts)
    style = resources.files("lazyshard.cli").joinpath("report_page.css").read_text(encoding="utf-8")
    stream = escape(facts.outlook.survey.directory)
    at = escape(moment(facts.outlook.survey.looked_at))
    parts = [
        f"{BEGINNING}{_HEAD}<title>lazyshard report: {stream}</title>\n<style>\n{style}</style>\n</head>\n<body>\n",
        f'<header><p class="faint">lazyshard report, {at}</p><h1>{stream}</h1>{_facts(facts)}</header>\n<main>\n',
        _summary(findings),
    ]
    parts += [_part(name, finding, bodies[name]) for name, finding in findings.items()]
    parts.append(
        f'</main>\n<footer class="faint">Looked at {at} by lazyshard {escape(__version__)}. The same facts for '
        f"programs: <code>lazyshard report … --json</code>.</footer>\n</body>\n</html>\n"
    )
    return "".join(parts)


def _bodies(facts: ReportFacts) -> dict[str, str]:
    return {
        "damage": damage_part(facts),
        "lengths": lengths_part(facts),
        "packing": packing_part(facts.packing),
        "balance": balance_part(facts),
        "shuffle": shuffle_part(facts.shuffle, facts.training.window),
        "rates": rates_part(facts),
        "waits": waits_part(facts),
        "refusals": refusals_part(facts.refusals),
        "disk": disk_part(facts),
    }


def _facts(facts: ReportFacts) -> str:
    census, chunks = facts.outlook.survey.census, facts.chunks
    told = [_number(census.chunks, "chunk")]
    if census.samples is not None:
        told.append(_number(census.samples, "sample"))
    if facts.samples_per_chunk:
        told.append(f"<b>{facts.samples_per_chunk:,}</b> a chunk")
    told.append(f"<b>{'ended' if census.ended else escape(facts.outlook.state or 'live')}</b>")
    if census.retired:
        told.append(f"{_number(census.retired, 'chunk')} deleted")
    looked = (
        f"{chunks.looked_at:,} of {count(chunks.there, 'chunk')} were looked at, evenly spaced: --chunks takes more."
    )
    sampled = f'<p class="faint">{escape(looked)}</p>' if chunks.looked_at + chunks.unread < chunks.there else ""
    return f"""<ul class="facts">{"".join(f"<li>{one}</li>" for one in told)}</ul>{sampled}"""


def _number(value: int, noun: str) -> str:
    number, _, name = count(value, noun).partition(" ")
    return f"<b>{number}</b> {name}"


def _summary(findings: Mapping[str, Finding]) -> str:
    changes = in_order(list(findings.values()))
    if not changes:
        return '<section class="card"><h2>What to change</h2><p class="change good">Nothing to change.</p></section>\n'
    where = {id(change): name for name, finding in findings.items() for change in finding.changes}
    rows = "".join(
        f'<li>{escape(change.text)} (<a href="#{where[id(change)]}">{escape(TITLES[where[id(change)]].lower())}</a>)'
        f"{_command(change)}</li>"
        for change in changes
    )
    return f'<section class="card"><h2>What to change</h2><ol class="changes">{rows}</ol></section>\n'


def _part(name: str, finding: Finding, body: str) -> str:
    changes = "".join(
        f'<p class="change{" bad" if change.weight >= _URGENT else ""}">{escape(change.text)}.{_command(change)}</p>'
        for change in finding.changes
    )
    nothing = '<p class="faint">Nothing to change.</p>' if finding.known and not finding.changes else ""
    top = f'<section class="card" id="{name}"><h2>{escape(TITLES[name])}</h2><p>{escape(finding.text)}</p>'
    return f"{top}{changes or nothing}{body}</section>\n"


def _command(change: Change) -> str:
    return f"<br><code>{escape(change.command)}</code>" if change.command else ""
