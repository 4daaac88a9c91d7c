"""`lazyshard verify-filesystem`: tests whether lazyshard can use a filesystem that two mounts or two machines share.

A `Side` in this process makes changes on the near side, and a process that serves another `Side` observes them on the
far side.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shlex
import sys
import textwrap
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Final, Literal, NamedTuple

from typer import Argument, BadParameter, Option

from lazyshard.cli import exits, output
from lazyshard.filesystem.side import Far, Side, Untried, error_name, serve

_REPLACEMENTS: Final = 200  # Enough to observe a replacement that is done in two steps and leaves a gap in between
ENTER_S: Final = 15.0  # Usable filesystems show a new folder at once if no process has looked up its name before


def command(
    near: Annotated[str | None, Argument(metavar="A", help="A folder on the first mount.")] = None,
    second: Annotated[str | None, Argument(metavar="B", help="The same folder on another mount. Default: A.")] = None,
    far: Annotated[str | None, Option(metavar="COMMAND", help="Start the other side, by ssh, srun, kubectl.")] = None,
    serving: Annotated[str | None, Option("--serve", metavar="FOLDER", help="Be the other side, for --far.")] = None,
    longest: Annotated[float, Option(metavar="SECONDS", help="Longest wait for a change to become visible.")] = 90.0,
    as_json: output.JsonOption = False,
) -> int:
    r"""Tests whether lazyshard can use a filesystem that two mounts or two machines share.

    Makes changes in A and observes them from the other side: from B, the same folder on a second mount of this machine,
    or from the process that --far starts on another machine. With A alone, two processes use one mount. Reports for
    each property that lazyshard's protocol needs whether it holds, its latency, and which settings to change. Works in
    a temporary folder below A and removes it.

    Examples:
        lazyshard verify-filesystem /data/folder
        lazyshard verify-filesystem /mnt/a/folder /mnt/b/folder
        lazyshard verify-filesystem /share/folder --far "ssh node2 lazyshard verify-filesystem --serve /share/folder"

    Exit codes:
        0  the filesystem can be used
        1  it works with limits, which are printed; or typer or rich is missing: pip install 'lazyshard\[cli]'
        2  usage error; no such folder
        3  it cannot be used
        4  the tests could not run: a folder cannot be written, the two folders are not the same, or the other side did
           not answer
    """
    for folder, hint in ((near, "A"), (second, "B"), (serving, "--serve")):
        none = folder is not None and not Path(folder).is_dir()
        output.refuse_if(none, hint, f"{folder} is not a folder")
    if serving is not None:
        output.refuse_if(near is not None or far is not None, "--serve", "cannot be combined with A, B or --far")
        return serve(serving)
    if near is None:
        raise BadParameter("give a folder, and B too if it is mounted twice", param_hint="A")
    output.refuse_if(far is not None and second is not None, "--far", "give B or --far, not both")
    output.refuse_if(not longest > 0, "--longest", f"expected more than 0 seconds, got {longest}")
    try:
        here = [sys.executable, "-m", "lazyshard.filesystem.side", second or near]
        other = here if far is None else shlex.split(far)
    except ValueError as cause:
        raise BadParameter(f"{far}: {cause}", param_hint="--far") from cause
    output.refuse_if(not other, "--far", "expected a command, found none")
    try:
        with Far(other) as side:
            found = measure(near, side, longest, output.explain)
    except (Untried, OSError) as error:
        output.complain(f"the tests could not run: {error}")
        return exits.UNTRIED
    code, verdict, text = conclude(found.lines)
    values = {"verdict": verdict, "text": text, **found._asdict(), "lines": [one._asdict() for one in found.lines]}
    seen = f"changes in {near} ({found.near or 'unknown'}), seen from {far or second or near} "
    seen += f"({found.far or 'unknown'}); round trip {1000 * found.round_trip_s:.1f} ms"
    output.show(values, (seen, "", *_table(found.lines), "", text), as_json)
    return code


class Judged(NamedTuple):
    """The result of one test; if it is not ok, also what it means and the remedy.

    slow: a change becomes visible, but late; limit: lazyshard works without the property, with the consequence in
    `means`; missing: lazyshard must not be used without it.
    """

    what: str
    found: str
    verdict: Literal["ok", "slow", "limit", "missing"] = "ok"
    means: str = ""
    remedy: str = ""


class Measured(NamedTuple):
    """The filesystem's type on both sides, the round trip to the far side, and the results."""

    near: str
    far: str
    round_trip_s: float
    lines: list[Judged]


def _table(lines: list[Judged]) -> Iterator[str]:
    left, indent = max(len(line.what) for line in lines), " " * 11
    for line in lines:
        yield f"{line.verdict:8} {line.what:{left}}  {line.found}"
        for text in (line.means, line.remedy and f"-> {line.remedy}"):
            yield from textwrap.wrap(text, 115, initial_indent=indent, subsequent_indent=indent)


def conclude(lines: list[Judged]) -> tuple[int, str, str]:
    """Returns the exit code, the verdict in a word, and the last line of the report."""
    if missing := [line.what for line in lines if line.verdict == "missing"]:
        return exits.REFUSED, "unfit", f"cannot be used: {'; '.join(missing)}"
    if limits := [line.what for line in lines if line.verdict != "ok"]:
        return exits.LIMITED, "limited", f"works with limits: {'; '.join(limits)}"
    return exits.DONE, "fits", "can be used"


class _Sight(NamedTuple):
    kind: str  # as in `Side.look`
    name: str
    means: str  # the consequence of a delay
    remedy: str = "shorter attribute caches: NFS actimeo=1 or noac; sshfs entry_timeout, attr_timeout, dcache_timeout"


_HEAD_LATE: Final = "readers see head.json this late, and a producer learns this late that another one has taken over"
_START_LATE: Final = "a reader that starts before its producer may be delayed this long; readers wait 60 s for a file"
_NO_MISSING: Final = "shorter caches of missing names: NFS lookupcache=positive; sshfs negative_timeout=0"
_NAMES_LATE: Final = (
    "new chunks in directories without head.json, and consumers not named by --consumers, appear this late"
)
# Each has its own folder, so that one test does not refresh the caches of another
SIGHTS: Final = {
    "replaced, by open": _Sight("open", "replaced/file", _HEAD_LATE),
    "new, by open": _Sight("open", "fresh/new", "readers see each new chunk this late"),
    "new, by open, asked for before": _Sight("open", "asked/new", _START_LATE, _NO_MISSING),
    "new, by listing": _Sight("list", "list/new", _NAMES_LATE, "sshfs: dir_cache=no; NFS: actimeo=1"),
}


def measure(folder: str, far: Far, longest: float, left: Callable[[str], None]) -> Measured:
    """Runs all tests in a temporary folder below `folder`. Takes about as long as the slowest change to become visible.

    Waits up to `longest` seconds for a change; calls `left` with a message if the temporary folder cannot be removed.
    """
    near, name = Side(folder), f".verify-filesystem-{secrets.token_hex(4)}"
    kinds = near.hello(), far.do("hello")
    near.make(name)
    near.enter(name, ENTER_S)
    try:
        if not far.do("enter", name, ENTER_S):
            unseen = f"a folder created in {folder} was not visible on the other side within {ENTER_S:.0f} s"
            raise Untried(f"{unseen}: are both the same folder?")
        started = time.monotonic()
        far.do("look", "list", "nothing")
        round_trip = time.monotonic() - started
        return Measured(*kinds, round_trip, list(_lines(near, far, longest)))
    finally:
        # A leftover folder does no harm, and its name says where it is from.
        with contextlib.suppress(Untried, OSError):
            far.do("clear")
        for path in near.clear()[-1:]:
            held = ", ".join(sorted(os.listdir(path))) or "nothing visible on this side"
            left(f"{path} could not be removed completely: remove it by hand (it holds {held})")


def _lines(near: Side, far: Far, longest: float) -> Iterator[Judged]:
    """Yields the result of each test, the most important ones first."""
    means = "nothing can be published: every file is created by a rename, most of them over an older file"
    remedy = "sshfs: a server with posix-rename (OpenSSH has it), no `-o workaround=...`; else another filesystem"
    if error := _error(near.put, "rename", 1) or _error(near.put, "rename", 2):
        yield Judged("rename over an existing file", error, "missing", means, remedy)
        return
    near.put("storm", 1)
    far.do("look", "open", "storm")
    far.ask("storm", "storm", _REPLACEMENTS, longest)
    for version in range(2, _REPLACEMENTS + 1):
        near.put("storm", version)
    yield judge_storm(far.answer())
    yield from _sights(near, far, longest)
    for what, name, why in (
        ("file", "rename", "it publishes a chunk only once the file is synced to the device"),
        ("directory", "", "it syncs the directory before it publishes a chunk"),
    ):
        means, remedy = f"no producer can run here: {why}; readers can", "run the producer where it is supported"
        error = _error(near.sync, name)
        yield _unless(not error, Judged(f"fsync of a {what}", error or "no error", "missing", means, remedy))
    means = "a second producer on the other side is not refused, but takes over the stream; nothing is lost"
    remedy = "NFS: no `nolock` and no `local_lock=flock`; Lustre: mount with -o flock; else one producer per stream"
    lock = _lock(near, far)
    yield _unless(lock == "holds", Judged("flock between the two", lock, "limit", means, remedy))
    means = "two producers that create the same stream at the same time may both believe that they own it"
    linked, remedy = _linked_over(near, far), "start the first producer of a stream alone"
    judged = Judged("hard link refuses an existing name", linked, "limit", means, remedy)
    yield _unless(linked == "holds", judged)


def _sights(near: Side, far: Far, longest: float) -> Iterator[Judged]:
    for kind, name, *_ in SIGHTS.values():
        near.make(name.partition("/")[0])
        if name.endswith("/file"):
            near.put(name, 3)
        # Fill the caches of the far side with the old content or the missing name, except for "fresh/new".
        if name != "fresh/new":
            far.do("look", kind, name)
    changed = dict[str, float]()
    for label, sight in SIGHTS.items():
        near.put(sight.name, 9)
        changed[label] = time.monotonic()
    asked = time.monotonic()
    found = far.do("watch", {label: (sight.kind, sight.name, 9) for label, sight in SIGHTS.items()}, longest)
    waited = time.monotonic() - asked
    yield judge_whole(found)
    for label, state in found.items():
        at = state["seconds"]
        yield judge_sight(label, None if at is None else asked - changed[label] + at, waited)


def _linked_over(near: Side, far: Far) -> str:
    # Let the far side cache that the name is missing: the link must be refused by the server.
    far.do("look", "open", "linked")
    near.put("linked-near", 1)
    far.do("put", "linked-far", 2)
    try:
        far.do("link", "linked-far", "linked-again")
        near.link("linked-near", "linked")
    except OSError:
        return "no hard links"
    with contextlib.suppress(OSError):
        far.do("link", "linked-far", "linked")
        return "replaced the file"
    return "holds"


def _lock(near: Side, far: Far) -> str:
    try:
        if (held := near.lock("lock")) is None:
            return "does not hold"
        with open(held, "rb"):
            return "holds" if far.do("lock", "lock") is None else "does not hold"
    except OSError as error:
        return _name(error)


def _error(operation: Callable[..., None], *arguments: Any) -> str:
    try:
        operation(*arguments)
    except OSError as error:
        return _name(error)
    return ""


def _name(error: OSError) -> str:
    # The far side reports only the name of an error.
    name = error_name(error) if error.errno else str(error.strerror)
    if name in ("ENOSPC", "EDQUOT"):
        raise Untried(f"no space left on the filesystem ({name}): free some, and try again") from error
    return name


def _unless(ok: bool, judged: Judged) -> Judged:
    return Judged(*judged[:2]) if ok else judged


def _unless_errors(errors: Mapping[str, int], what: str, found: str, begin: str = "") -> Judged:
    # Readers open the file again after ESTALE.
    others = ", ".join(f"{count} {name}" for name, count in errors.items() if name != "ESTALE")
    means, remedy = "readers stop with this error", "check the logs of client and server"
    return _unless(not others, Judged(what, begin + (others or found), "missing", means, remedy))


def judge_storm(storm: dict[str, Any]) -> Judged:
    """Judges reads of a file that was replaced many times meanwhile, see `Side.storm`."""
    what, found = "rename replaces in one step", f"{storm['reads']} reads during {_REPLACEMENTS} replacements: "
    # If 5 % of reads are truncated, three attempts in a row fail once in 8,000; on a busy machine with few reads, up to
    # 3 truncated ones are no evidence.
    if storm["missing"] or storm["torn"] > max(3, 0.05 * storm["reads"]):
        bad = (("missing", "found no file"), ("torn", "truncated"))
        found += ", ".join(f"{storm[key]} {word}" for key, word in bad if storm[key])
        means = "a cursor that is missing for a moment looks like no cursor: chunks still needed could be deleted"
        return Judged(what, found, "missing", means, "another filesystem")
    if storm["back"]:
        means = "readers ignore a head that is older than one they have seen, so new chunks become visible later"
        return Judged(what, f"{found}{storm['back']} went back", "limit", means, "shorter or no attribute caches")
    seen = f"{storm['torn']} truncated, which lazyshard reads again" if storm["torn"] else "all complete"
    if stale := storm["errors"].get("ESTALE"):
        seen += f"; {stale} ESTALE, after which lazyshard opens the file again"
    return _unless_errors(storm["errors"], what, seen, found)


def judge_whole(found: dict[str, dict[str, Any]]) -> Judged:
    """Judges whether renamed files appear complete, by the results of `Side.watch` by label."""
    # A replaced file may be truncated to its cached size and is read again, as in `judge_storm`; `judge_sight` judges
    # how long that lasts.
    torn = sum(state["torn"] for label, state in found.items() if label.startswith("new"))
    what, means = "a renamed file appears complete", "readers report intact chunks as damaged"
    if torn:
        return Judged(what, f"{torn} reads were truncated", "missing", means, "another filesystem, or no caches")
    return _unless_errors(sum((Counter(state["errors"]) for state in found.values()), Counter()), what, "yes")


def judge_sight(label: str, at: float | None, waited: float) -> Judged:
    """Judges a latency: ok up to 1 s, then slow; for files that readers open, missing beyond their grace period."""
    sight = SIGHTS[label]
    found = f"not within {waited:.0f} s" if at is None else f"{at:.1f} s"
    # A second does not matter for chunks that take seconds to train.
    if at is not None and at <= 1.0:
        return Judged(label, "at once" if at < 0.1 else found)
    # Readers wait this long for a file that `head.json` announces (`stream.reader.GRACE_S`).
    if sight.kind == "open" and (at is None or at > 60.0):
        means = f"{sight.means}; after 60 s readers report it as missing"
        return Judged(label, found, "missing", means, sight.remedy)
    return Judged(label, found, "limit" if at is None else "slow", sight.means, sight.remedy)
