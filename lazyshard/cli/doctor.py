"""`lazyshard doctor`: what is installed, and whether it works together."""

from __future__ import annotations

import importlib.metadata
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from typing import Annotated, Final

import typer

from lazyshard.cli import environment, exits
from lazyshard.cli.wording import count, say
from lazyshard.examination import GROUP, Examine, Finding

HELP: Final = """Says what is installed, whether it works together, and what would happen.

[bold]lazyshard[/bold]: versions, which extras are installed and what each is for, inotify; with --stream the filesystem
that a stream lies on, as this machine sees it: its type, renames, fsync, locks, links, inotify.

[bold]swift[/bold]: the versions around ms-swift, whether lazyshard is active in this interpreter, each place of
ms-swift that it hooks into, and what `megatron sft --sharded_lazy true` and `swift sft --sharded_lazy true` would do.
Nothing of ms-swift is imported or changed."""

EPILOG: Final = """[bold]Examples[/bold]

lazyshard doctor

lazyshard doctor --stream /shared/stream

lazyshard doctor swift --json

[bold]Exit codes[/bold]

  0  all is as it should be

  1  something is missing or does not fit: it is marked NOT OK; or typer or rich is: pip install 'lazyshard\\[cli]'

  2  usage

 70  unexpected error

 71  not enough memory

130  Ctrl-C"""

_MARKS: Final = {True: "ok", False: "NOT OK", None: ""}


def command(
    area: Annotated[
        str | None,
        typer.Argument(metavar="[AREA]", help="What to look at: lazyshard or swift. Default: all that is installed."),
    ] = None,
    stream: Annotated[
        str | None,
        typer.Option(metavar="DIR", help="Look at the filesystem of this stream, which need not be there yet, too."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON object on one line for each area.")] = False,
) -> Callable[[], int]:
    """Returns what is to be done; see `lazyshard.cli.command`."""
    known = {entry.name: entry for entry in importlib.metadata.entry_points(group=GROUP)}
    names = [environment.AREA, *sorted(known)]
    areas = names if area is None else [area]
    if not set(names) >= set(areas):
        raise typer.BadParameter(f"{area!r} is unknown; choose from: {', '.join(names)}", param_hint="AREA")
    if stream is not None and environment.AREA not in areas:
        raise typer.BadParameter(f"goes with {environment.AREA}, not with {area}", param_hint="--stream")

    def run(one: str) -> int:
        if one == environment.AREA:
            return _run(one, lambda: environment.examine(stream), as_json, asked=True)
        return _run(one, known[one].load(), as_json, asked=area is not None)

    return lambda: max(map(run, areas))


def _applies(examine: Examine) -> bool:
    """Whether there is anything to examine; see `lazyshard.examination`."""
    told = getattr(sys.modules.get(examine.__module__), "applies", None)
    return told is None or bool(told())


def _run(area: str, examine: Examine, as_json: bool, *, asked: bool) -> int:
    if not asked and not _applies(examine):
        if as_json:
            say(json.dumps({"area": area, "ok": True, "findings": []}))
        else:
            say(f"{area}: not installed, so there is nothing to examine; `lazyshard doctor {area}` tells what it needs")
        return exits.DONE
    findings = list(examine())
    missing = sum(finding.ok is False for finding in findings)
    if as_json:
        say(json.dumps({"area": area, "ok": not missing, "findings": [asdict(finding) for finding in findings]}))
    else:
        for line in _lines(findings):
            say(line)
        say(f"{count(missing, 'thing')} not as it should be" if missing else "all is as it should be")
    return exits.MISSING if missing else exits.DONE


def _lines(findings: Sequence[Finding]) -> Iterator[str]:
    section = None
    marks = max((len(_MARKS[finding.ok]) for finding in findings), default=0)
    for finding in findings:
        if finding.section != section:
            section = finding.section
            subjects = max(len(other.subject) for other in findings if other.section == section)
            yield section
        yield f"  {_MARKS[finding.ok]:{marks}}  {finding.subject:{subjects}}  {finding.answer}".rstrip()
    if findings:
        yield ""
