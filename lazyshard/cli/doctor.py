"""`lazyshard doctor`: checks what is installed and whether it works together.

A package adds an area by an entry point in the group `GROUP`: a function without arguments that returns its findings in
the order of the report. If the function's module has a function `applies` that returns False, there is nothing to
check, and the area is checked only if the user names it.
"""

from __future__ import annotations

import importlib.metadata
import itertools
import platform
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory, gettempdir
from typing import Annotated, Final, NamedTuple

from typer import Argument, Option

from lazyshard import __version__
from lazyshard.cli import exits, output
from lazyshard.cli.verify_filesystem import measure
from lazyshard.errors import redact
from lazyshard.filesystem.side import Far, Untried, type_of
from lazyshard.format.records import HEAD
from lazyshard.store.files import is_url
from lazyshard.stream.waiting import Waker

GROUP: Final = "lazyshard.doctor"  # The entry-point group; the name of an entry is the AREA of the command
_MARKS: Final = {True: "ok", False: "NOT OK", None: ""}
_AREA: Final = "lazyshard"

PURPOSES: Final = {
    "torch": "training",
    "cli": "the command lazyshard",
    "producer": "the command lazyshard-producer",
    "arrow": "Parquet, Arrow and Hugging Face data sets as sources",
    "objects": "streams in an object store",
    "config": "configurations in YAML",
    "plots": "pictures of lazyshard watch and inspect",
    "ray": "a stream as the sink of Ray Data",
    "torchdata": "a stream as a source of torchdata.nodes",
    "megatron": "lazyshard export",
}
"""The purpose of each extra."""


class Finding(NamedTuple):
    """A line of the report, under the heading `section`. Findings of a section are consecutive.

    `ok` is None for information without a verdict.
    """

    section: str
    subject: str
    answer: str
    ok: bool | None = None


def command(
    area: Annotated[str | None, Argument(metavar="[AREA]", help="lazyshard or swift. Default: all installed.")] = None,
    stream: Annotated[str | None, Option(metavar="DIR", help="Also test the filesystem of this stream.")] = None,
    as_json: Annotated[bool, Option("--json", help="Print one JSON object per area, each on one line.")] = False,
) -> int:
    r"""Checks what is installed and whether it works together.

    [bold]lazyshard[/bold]: versions, the installed extras and the purpose of each, and inotify. With --stream also the
    stream's filesystem as processes on this machine see it: type, renames, fsync, locks, hard links, inotify.

    [bold]swift[/bold]: the versions of ms-swift and related packages, whether lazyshard is active in this interpreter,
    each place where it hooks into ms-swift, and what `megatron sft --sharded_lazy true` and `swift sft --sharded_lazy
    true` would do. Neither imports nor changes ms-swift.

    Examples:
        lazyshard doctor
        lazyshard doctor --stream /shared/stream
        lazyshard doctor swift --json

    Exit codes:
        0  all checks passed
        1  a check failed and is marked NOT OK; or typer or rich is missing: pip install 'lazyshard\[cli]'
        2  usage error
    """
    known = {entry.name: entry for entry in importlib.metadata.entry_points(group=GROUP)}
    names = [_AREA, *sorted(known)]
    areas = names if area is None else [area]
    output.refuse_if(not set(names) >= set(areas), "AREA", f"{area!r} is unknown; choose from: {', '.join(names)}")
    elsewhere = stream is not None and _AREA not in areas
    output.refuse_if(elsewhere, "--stream", f"can only be used with {_AREA}, not with {area}")
    code = exits.DONE
    for one in areas:
        examine: Callable[[], Sequence[Finding]] = (lambda: _ours(stream)) if one == _AREA else known[one].load()
        applies = getattr(sys.modules.get(examine.__module__), "applies", None)
        there = one == _AREA or area is not None or applies is None or applies()
        findings = list(examine()) if there else []
        missing = sum(finding.ok is False for finding in findings)
        last = f"{output.count(missing, 'check')} failed" if missing else "all checks passed"
        if not there:
            last = f"{one}: not installed, nothing to check; `lazyshard doctor {one}` shows what it needs"
        values = {"area": one, "ok": not missing, "findings": [finding._asdict() for finding in findings]}
        output.show(values, [*_lines(findings), last], as_json)
        code = exits.MISSING if missing else code
    return code


def _ours(stream: str | None) -> list[Finding]:
    return [*_versions(), _inotify("inotify", gettempdir(), otherwise=False), *(_filesystem(stream) if stream else ())]


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
        yield Finding(section, "type", "an object store, which is not tested here: see docs/object-storage.md")
        return
    directory = Path(stream).expanduser().absolute()
    place = directory if directory.is_dir() else directory.parent
    if not place.is_dir():
        yield Finding(section, "directory", f"neither it nor {place} exists: is the filesystem mounted?", False)
        return
    yield Finding(section, "directory", "exists" if place == directory else f"does not exist yet; {place} does", True)
    yield Finding(section, "type", type_of(str(place)) or "unknown")
    try:
        with Far([sys.executable, "-m", "lazyshard.filesystem.side", str(place)]) as far:
            lines = measure(str(place), far, 20.0, output.explain).lines
    except Untried as error:
        yield Finding(section, "files", f"could not be tested: {error}", False)
    except OSError as error:
        why = f"not possible for this user ({error.strerror}): the stream can be read, but not produced"
        yield Finding(section, "writing", why)
    else:
        for line in lines:
            answer = ": ".join(filter(None, (line.found, line.means)))
            yield Finding(section, line.what, answer, {"ok": True, "missing": False}.get(line.verdict))
        yield _inotify(section, str(place), otherwise=None)


def _inotify(section: str, place: str, *, otherwise: bool | None) -> Finding:
    """Tests whether inotify wakes a process that waits for a file in a directory."""
    woken = False
    with suppress(OSError), TemporaryDirectory(prefix=".lazyshard-doctor-", dir=place) as at, Waker(Path(at)) as waker:
        waker.sleep(0)
        (Path(at) / HEAD).write_text("{}")
        woken = waker.sleep(2.0)
    remedy = "does not work, readers poll instead; check whether sysctl can raise fs.inotify.max_user_instances"
    return Finding(section, "inotify", "works on this machine" if woken else remedy, woken or otherwise)
