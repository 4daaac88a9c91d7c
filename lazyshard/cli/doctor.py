"""`lazyshard doctor`: what is installed, and whether it works together."""

from __future__ import annotations

import contextlib
import ctypes
import importlib.metadata
import json
import os
import platform
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Final

import filelock
import typer

from lazyshard import __version__
from lazyshard.cli import exits
from lazyshard.cli.output import count, epilog, say
from lazyshard.errors import redact
from lazyshard.examination import GROUP, Examine, Finding
from lazyshard.filesystem.side import type_of
from lazyshard.format.names import HEAD
from lazyshard.store.durable import sync_directory
from lazyshard.store.urls import is_url
from lazyshard.stream.waiting import Waker

HELP: Final = """Says what is installed, whether it works together, and what would happen.

[bold]lazyshard[/bold]: versions, which extras are installed and what each is for, inotify; with --stream the filesystem
that a stream lies on, as this machine sees it: its type, renames, fsync, locks, links, inotify.

[bold]swift[/bold]: the versions around ms-swift, whether lazyshard is active in this interpreter, each place of
ms-swift that it hooks into, and what `megatron sft --sharded_lazy true` and `swift sft --sharded_lazy true` would do.
Nothing of ms-swift is imported or changed."""

EPILOG: Final = epilog(
    ["lazyshard doctor", "lazyshard doctor --stream /shared/stream", "lazyshard doctor swift --json"],
    {
        0: "all is as it should be",
        1: "something is missing or does not fit: it is marked NOT OK; "
        "or typer or rich is: pip install 'lazyshard\\[cli]'",
        2: "usage",
    },
)

_MARKS: Final = {True: "ok", False: "NOT OK", None: ""}
_AREA: Final = "lazyshard"
NEEDED: Final = ("filelock", "numpy", "orjson", "pybase64", "watchdog", "xxhash")

EXTRAS: Final[dict[str, tuple[str, tuple[str, ...]]]] = {
    "torch": ("training", ("torch",)),
    "cli": ("the command lazyshard", ("jinja2", "prometheus-client", "rich", "typer")),
    "producer": (
        "the command lazyshard-producer",
        ("annotated-types", "prometheus-client", "pydantic", "rich", "typer", "zstandard"),
    ),
    "arrow": ("Parquet, Arrow and Hugging Face data sets as sources", ("pyarrow",)),
    "objects": ("streams in an object store", ("fsspec", "s3fs")),
    "config": ("configurations in YAML", ("pydantic", "pyyaml")),
    "plots": ("pictures of lazyshard watch", ("matplotlib",)),
    "ray": ("a stream as the sink of Ray Data", ("pyarrow", "ray")),
    "torchdata": ("a stream as a source of torchdata.nodes", ("torch", "torchdata")),
}
"""What each extra is for, and what it installs."""

_LIMITS: Final = Path("/proc/sys/fs/inotify")
_WAKE_S: Final = 2.0


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
    names = [_AREA, *sorted(known)]
    areas = names if area is None else [area]
    if not set(names) >= set(areas):
        raise typer.BadParameter(f"{area!r} is unknown; choose from: {', '.join(names)}", param_hint="AREA")
    if stream is not None and _AREA not in areas:
        raise typer.BadParameter(f"goes with {_AREA}, not with {area}", param_hint="--stream")

    def ours() -> list[Finding]:
        return [*_versions(), *_inotify(), *([] if stream is None else _filesystem(stream))]

    def run(one: str) -> int:
        examine = ours if one == _AREA else known[one].load()
        return _run(one, examine, as_json, asked=one == _AREA or area is not None)

    return lambda: max(map(run, areas))


def _run(area: str, examine: Examine, as_json: bool, *, asked: bool) -> int:
    applies = getattr(sys.modules.get(examine.__module__), "applies", None)
    there = asked or applies is None or applies()
    findings = list(examine()) if there else []
    missing = sum(finding.ok is False for finding in findings)
    if as_json:
        say(json.dumps({"area": area, "ok": not missing, "findings": [asdict(finding) for finding in findings]}))
        return exits.MISSING if missing else exits.DONE
    for line in _lines(findings):
        say(line)
    if not there:
        say(f"{area}: not installed, so there is nothing to examine; `lazyshard doctor {area}` tells what it needs")
    else:
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


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _versions() -> Iterator[Finding]:
    yield Finding("versions", "python", f"{platform.python_version()} in {sys.executable}")
    yield Finding("versions", "system", platform.platform())
    yield Finding("versions", "lazyshard", __version__)
    for name in NEEDED:
        found = _version(name)
        yield Finding("versions", name, found or "not installed: install lazyshard again", found is not None)
    for extra, (purpose, names) in EXTRAS.items():
        versions = {name: _version(name) for name in names}
        there = None not in versions.values()
        answer = ", ".join(f"{name} {version}" for name, version in versions.items())
        answer = answer if there else f"not installed: pip install 'lazyshard[{extra}]'"
        yield Finding("extras", extra, f"{answer} (for {purpose})", there or None)


def _inotify() -> Iterator[Finding]:
    if not _LIMITS.is_dir():
        yield Finding("inotify", "instances", "none on this system: whoever waits polls")
        return
    for name in ("max_user_instances", "max_user_watches"):
        with contextlib.suppress(OSError):
            yield Finding("inotify", name, (_LIMITS / name).read_text(encoding="ascii").strip())
    descriptor = ctypes.CDLL(None, use_errno=True).inotify_init1(os.O_CLOEXEC)
    why = os.strerror(ctypes.get_errno())
    remedy = "readers that wait poll alone, which is slower; raise fs.inotify.max_user_instances by sysctl"
    if descriptor >= 0:
        os.close(descriptor)
    answer = "can be had" if descriptor >= 0 else f"cannot be had ({why}): {remedy}"
    yield Finding("inotify", "an instance", answer, descriptor >= 0)


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
        folder = tempfile.TemporaryDirectory(prefix=".lazyshard-doctor-", dir=place, ignore_cleanup_errors=True)
    except OSError as error:
        why = f"not possible for this user ({error.strerror}): it can be read, not produced"
        yield Finding(section, "writing", why)
        return
    with folder as scratch:
        for subject, (needed, without) in _LOOKS.items():
            try:
                ok, problem = _works(subject, Path(scratch)), ""
            except OSError as error:
                ok, problem = False, f" ({error.strerror or error})"
            answer = "works on this machine" if ok else f"does not work{problem}: {without}"
            yield Finding(section, subject, answer, ok or (False if needed else None))


def _works(subject: str, scratch: Path) -> bool:
    """Tries one of `_LOOKS` in a folder of its own; raises OSError where the filesystem refuses it."""
    one, other = scratch / HEAD, scratch / "other"
    match subject:
        case "rename over a file":
            for content in ("old", "new"):
                other.write_text(content)
                os.replace(other, one)
            return one.read_text() == "new" and not other.exists()
        case "fsync":
            with open(other, "wb") as file:
                os.fsync(file.fileno())
            sync_directory(scratch)
        case "file locks":
            first, second = (filelock.FileLock(scratch / "lock", timeout=0, thread_local=False) for _ in range(2))
            with first, contextlib.suppress(filelock.Timeout), second:
                return False
        case "hard links":
            other.touch()
            os.link(other, scratch / "link")
        case "inotify":
            with Waker(scratch) as waker:
                waker.sleep(0)
                one.write_text("{}")
                return waker.sleep(_WAKE_S)
    return True


_LOOKS: Final = {
    "rename over a file": (True, "do not use it for streams, see docs/filesystems.md"),
    "fsync": (True, "no producer can run there; readers can"),
    "file locks": (False, "a second producer is not refused at once: it takes over, and the first is fenced"),
    "hard links": (False, "streams are created by a rename, which two machines may do at the same moment"),
    "inotify": (False, "whoever waits polls, as for the writes of other machines anyway"),
}
"""What is looked at, whether it is needed, and what is the matter without it; as docs/filesystems.md has it."""
