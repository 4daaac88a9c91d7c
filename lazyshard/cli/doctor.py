"""`lazyshard doctor`: what is installed, and whether it works together.

A package that has something to examine names a function without arguments in the entry-point group `GROUP`; it returns
its findings in the order in which they are to be read. A function `applies` beside it may tell whether there is
anything to examine; where there is not, only who asks for it has it examined.
"""

from __future__ import annotations

import importlib.metadata
import itertools
import platform
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory, gettempdir
from typing import Annotated, Final

from typer import Argument, Option

from lazyshard import __version__
from lazyshard.cli import exits, output
from lazyshard.cli.verify_filesystem import measure
from lazyshard.errors import redact
from lazyshard.filesystem.side import Far, Untried, type_of
from lazyshard.format.records import HEAD
from lazyshard.store.files import is_url
from lazyshard.stream.waiting import Waker

GROUP: Final = "lazyshard.doctor"  # The entry-point group; an entry's name is what is given to the command
_MARKS: Final = {True: "ok", False: "NOT OK", None: ""}
_AREA: Final = "lazyshard"

PURPOSES: Final = {
    "torch": "training",
    "cli": "the command lazyshard",
    "producer": "the command lazyshard-producer",
    "arrow": "Parquet, Arrow and Hugging Face data sets as sources",
    "objects": "streams in an object store",
    "config": "configurations in YAML",
    "plots": "pictures of lazyshard watch",
    "ray": "a stream as the sink of Ray Data",
    "torchdata": "a stream as a source of torchdata.nodes",
    "megatron": "lazyshard export",
}
"""What each extra is for."""


@dataclass(frozen=True)
class Finding:
    """A thing that was looked at, under a heading; those of a section are together. `ok` is None without a verdict."""

    section: str
    subject: str
    answer: str
    ok: bool | None = None


def command(
    area: Annotated[str | None, Argument(metavar="[AREA]", help="lazyshard or swift. Default: all installed.")] = None,
    stream: Annotated[str | None, Option(metavar="DIR", help="Try the filesystem of this stream.")] = None,
    as_json: Annotated[bool, Option("--json", help="Print a JSON object on one line for each area.")] = False,
) -> int:
    r"""Says what is installed, whether it works together, and what would happen.

    [bold]lazyshard[/bold]: versions, which extras are installed and what each is for, inotify; with --stream the
    filesystem that a stream lies on, as processes of this machine see it: its type, renames, fsync, locks, links,
    inotify.

    [bold]swift[/bold]: the versions around ms-swift, whether lazyshard is active in this interpreter, each place of
    ms-swift that it hooks into, and what `megatron sft --sharded_lazy true` and `swift sft --sharded_lazy true` would
    do. Nothing of ms-swift is imported or changed.

    Examples:
        lazyshard doctor
        lazyshard doctor --stream /shared/stream
        lazyshard doctor swift --json

    Exit codes:
        0  all is as it should be
        1  something is missing or does not fit: it is marked NOT OK; or typer or rich is: pip install 'lazyshard\[cli]'
        2  usage
    """
    known = {entry.name: entry for entry in importlib.metadata.entry_points(group=GROUP)}
    names = [_AREA, *sorted(known)]
    areas = names if area is None else [area]
    output.refuse_if(not set(names) >= set(areas), "AREA", f"{area!r} is unknown; choose from: {', '.join(names)}")
    output.refuse_if(stream is not None and _AREA not in areas, "--stream", f"goes with {_AREA}, not with {area}")
    code = exits.DONE
    for one in areas:
        examine: Callable[[], Sequence[Finding]] = (lambda: _ours(stream)) if one == _AREA else known[one].load()
        applies = getattr(sys.modules.get(examine.__module__), "applies", None)
        there = one == _AREA or area is not None or applies is None or applies()
        findings = list(examine()) if there else []
        missing = sum(finding.ok is False for finding in findings)
        last = f"{output.count(missing, 'thing')} not as it should be" if missing else "all is as it should be"
        if not there:
            last = f"{one}: not installed, so there is nothing to examine; `lazyshard doctor {one}` tells what it needs"
        values = {"area": one, "ok": not missing, "findings": [asdict(finding) for finding in findings]}
        output.show(values, [*_lines(findings), last], as_json)
        code = exits.MISSING if missing else code
    return code


def _ours(stream: str | None) -> list[Finding]:
    local = _inotify("inotify", gettempdir(), otherwise=False)
    return [*_versions(), local, *([] if stream is None else _filesystem(stream))]


def _lines(findings: Sequence[Finding]) -> Iterator[str]:
    marks = max((len(_MARKS[finding.ok]) for finding in findings), default=0)
    for section, group in itertools.groupby(findings, lambda finding: finding.section):
        yield section
        found = list(group)
        width = max(len(finding.subject) for finding in found)
        for one in found:
            yield f"  {_MARKS[one.ok]:{marks}}  {one.subject:{width}}  {one.answer}".rstrip()
    yield from [""] if findings else []


def _version(name: str) -> str | None:
    with suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(name)
    return None


def _versions() -> Iterator[Finding]:
    yield Finding("versions", "python", f"{platform.python_version()} in {sys.executable}")
    yield Finding("versions", "system", platform.platform())
    yield Finding("versions", "lazyshard", __version__)
    required: dict[str, dict[str, str | None]] = {extra: {} for extra in ("", *PURPOSES)}
    for line in importlib.metadata.requires("lazyshard") or ():
        name, of = re.split(r"[^\w-]", line)[0], re.search(r"extra == ['\"]([\w-]+)", line)
        if "python_version" not in line:
            required.setdefault(of[1] if of else "", {})[name] = _version(name)
    for name, found in required[""].items():
        yield Finding("versions", name, found or "not installed: install lazyshard again", found is not None)
    for extra, purpose in PURPOSES.items():
        versions = required[extra]
        there = bool(versions) and None not in versions.values()
        answer = ", ".join(f"{name} {version}" for name, version in versions.items())
        answer = answer if there else f"not installed: pip install 'lazyshard[{extra}]'"
        yield Finding("extras", extra, f"{answer} (for {purpose})", there or None)


def _filesystem(stream: str) -> Iterator[Finding]:
    section = f"filesystem of {redact(stream)}"
    if is_url(stream):
        yield Finding(section, "type", "an object store, which is not looked at here: see docs/object-storage.md")
        return
    directory = Path(stream).expanduser().absolute()
    place = directory if directory.is_dir() else directory.parent
    if not place.is_dir():
        yield Finding(section, "directory", f"neither it nor {place} is there: is the filesystem mounted?", False)
        return
    yield Finding(section, "directory", "there" if place == directory else f"not there yet; {place} is", True)
    yield Finding(section, "type", type_of(str(place)) or "unknown")
    try:
        with Far([sys.executable, "-m", "lazyshard.filesystem.side", str(place)]) as far:
            lines = measure(str(place), far, 20.0, output.explain).lines
    except Untried as error:
        yield Finding(section, "files", f"could not be tried: {error}", False)
    except OSError as error:
        why = f"not possible for this user ({error.strerror}): it can be read, not produced"
        yield Finding(section, "writing", why)
    else:
        for line in lines:
            answer = ": ".join(filter(None, (line.found, line.means)))
            yield Finding(section, line.what, answer, {"ok": True, "missing": False}.get(line.verdict))
        yield _inotify(section, str(place), otherwise=None)


def _inotify(section: str, place: str, *, otherwise: bool | None) -> Finding:
    """Tries whether whoever waits for a file in a directory is told of it."""
    woken = False
    with suppress(OSError), TemporaryDirectory(prefix=".lazyshard-doctor-", dir=place) as at, Waker(Path(at)) as waker:
        waker.sleep(0)
        (Path(at) / HEAD).write_text("{}")
        woken = waker.sleep(2.0)
    remedy = "wakes nobody: whoever waits polls; see whether fs.inotify.max_user_instances can be raised by sysctl"
    return Finding(section, "inotify", "works on this machine" if woken else remedy, woken or otherwise)
