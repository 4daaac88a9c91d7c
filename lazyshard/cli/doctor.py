"""`lazyshard doctor`: what is installed, and whether it works together."""

from __future__ import annotations

import contextlib
import ctypes
import importlib.metadata
import json
import os
import platform
import shutil
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
    [
        "lazyshard doctor",
        "lazyshard doctor --stream /shared/stream",
        "lazyshard doctor swift --json",
    ],
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

    def run(one: str) -> int:
        if one == _AREA:
            return _run(one, lambda: _examine(stream), as_json, asked=True)
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


def _examine(stream: str | None = None) -> list[Finding]:
    """Returns the findings; with those of the filesystem of a stream, which need not be there yet."""
    return [*_versions(), *_extras(), *_inotify(), *([] if stream is None else _filesystem(stream))]


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


def _extras() -> Iterator[Finding]:
    for extra, (purpose, names) in EXTRAS.items():
        found = {name: _version(name) for name in names}
        if None in found.values():
            answer = f"not installed: pip install 'lazyshard[{extra}]'"
        else:
            answer = ", ".join(f"{name} {version}" for name, version in found.items())
        yield Finding("extras", extra, f"{answer} (for {purpose})", None if None in found.values() else True)


def _inotify() -> Iterator[Finding]:
    if not _LIMITS.is_dir():
        yield Finding("inotify", "instances", "none on this system: whoever waits polls")
        return
    for name in ("max_user_instances", "max_user_watches"):
        with contextlib.suppress(OSError):
            yield Finding("inotify", name, (_LIMITS / name).read_text(encoding="ascii").strip())
    descriptor = ctypes.CDLL(None, use_errno=True).inotify_init1(os.O_CLOEXEC)
    if descriptor >= 0:
        os.close(descriptor)
        yield Finding("inotify", "an instance", "can be had", True)
    else:
        why = os.strerror(ctypes.get_errno())
        remedy = "readers that wait poll alone, which is slower; raise fs.inotify.max_user_instances by sysctl"
        yield Finding("inotify", "an instance", f"cannot be had ({why}): {remedy}", False)


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
        scratch = Path(tempfile.mkdtemp(prefix=".lazyshard-doctor-", dir=place))
    except OSError as error:
        yield Finding(
            section, "writing", f"not possible for this user ({error.strerror}): it can be read, not produced"
        )
        return
    try:
        for subject, (look, needed, without) in _LOOKS.items():
            try:
                ok, problem = look(scratch), ""
            except OSError as error:
                ok, problem = False, f" ({error.strerror or error})"
            if ok:
                yield Finding(section, subject, "works on this machine", True)
            else:
                yield Finding(section, subject, f"does not work{problem}: {without}", False if needed else None)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _renames(scratch: Path) -> bool:
    for content in ("old", "new"):
        (scratch / "fresh").write_text(content)
        os.replace(scratch / "fresh", scratch / HEAD)
    return (scratch / HEAD).read_text() == "new" and not (scratch / "fresh").exists()


def _syncs(scratch: Path) -> bool:
    with open(scratch / "synced", "wb") as file:
        os.fsync(file.fileno())
    sync_directory(scratch)
    return True


def _locks(scratch: Path) -> bool:
    first, second = (filelock.FileLock(scratch / "lock", timeout=0, thread_local=False) for _ in range(2))
    with first:
        try:
            with second:
                return False
        except filelock.Timeout:
            return True


def _links(scratch: Path) -> bool:
    (scratch / "linked").touch()
    os.link(scratch / "linked", scratch / "link")
    return True


def _wakes(scratch: Path) -> bool:
    with Waker(scratch) as waker:
        waker.sleep(0)
        (scratch / HEAD).write_text("{}")
        return waker.sleep(_WAKE_S)


_LOOKS: Final[dict[str, tuple[Callable[[Path], bool], bool, str]]] = {
    "rename over a file": (_renames, True, "do not use it for streams, see docs/filesystems.md"),
    "fsync": (_syncs, True, "no producer can run there; readers can"),
    "file locks": (_locks, False, "a second producer is not refused at once: it takes over, and the first is fenced"),
    "hard links": (_links, False, "streams are created by a rename, which two machines may do at the same moment"),
    "inotify": (_wakes, False, "whoever waits polls, as for the writes of other machines anyway"),
}
"""What is looked at, whether it is needed, and what is the matter without it; as docs/filesystems.md has it."""
