"""`lazyshard verify-filesystem`: whether lazyshard can use a filesystem that two mounts or two machines share.

Changes are made on the near side, by a `Side` here, and looked at from the far one, a process that serves another.
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

_REPLACEMENTS: Final = 200  # Enough that a replacement in two steps, with a moment of nothing in between, is met
ENTER_S: Final = 15.0  # A folder just made, under a name that nobody has asked for, shows at once on anything usable


def command(
    near: Annotated[str | None, Argument(metavar="A", help="A folder on the first mount.")] = None,
    second: Annotated[str | None, Argument(metavar="B", help="The same folder on another mount. Default: A.")] = None,
    far: Annotated[str | None, Option(metavar="COMMAND", help="Starts the other side: by ssh, srun, kubectl.")] = None,
    serving: Annotated[str | None, Option("--serve", metavar="FOLDER", help="Be the other side, for --far.")] = None,
    longest: Annotated[float, Option(metavar="SECONDS", help="How long to wait for what does not show.")] = 90.0,
    as_json: output.JsonOption = False,
) -> int:
    r"""Tells whether lazyshard can use a filesystem that two mounts or two machines share.

    Changes are made in A and looked at from the other side: B, the same folder on a second mount of this machine, or
    what --far starts on another machine. With A alone two processes use one mount. Says of each thing that lazyshard's
    protocol needs whether it holds, what it costs, and what to set. Works in a folder of its own and removes it.

    Examples:
        lazyshard verify-filesystem /data/folder
        lazyshard verify-filesystem /mnt/a/folder /mnt/b/folder
        lazyshard verify-filesystem /share/folder --far "ssh node2 lazyshard verify-filesystem --serve /share/folder"

    Exit codes:
        0  the filesystem fits
        1  it works with limits, which are printed; or typer or rich is missing: pip install 'lazyshard\[cli]'
        2  usage; there is no such folder
        3  it does not fit
        4  it could not be tried: a folder cannot be written, the two are not the same one, the other side did not
           answer
    """
    for folder, hint in ((near, "A"), (second, "B"), (serving, "--serve")):
        none = folder is not None and not Path(folder).is_dir()
        output.refuse_if(none, hint, f"{folder}: expected a folder on a filesystem, found none")
    if serving is not None:
        output.refuse_if(near is not None or far is not None, "--serve", "stands alone")
        return serve(serving)
    if near is None:
        raise BadParameter("give a folder, twice where it is mounted twice", param_hint="A")
    output.refuse_if(far is not None and second is not None, "--far", "give B or --far, not both")
    output.refuse_if(not longest > 0, "--longest", f"more than 0 seconds, got {longest}")
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
        output.complain(f"it could not be tried: {error}")
        return exits.UNTRIED
    code, verdict, text = conclude(found.lines)
    values = {"verdict": verdict, "text": text, **found._asdict(), "lines": [one._asdict() for one in found.lines]}
    seen = f"changes in {near} ({found.near or 'unknown'}), seen from {far or second or near} "
    seen += f"({found.far or 'unknown'}); a question there and back takes {1000 * found.round_trip_s:.1f} ms"
    output.show(values, (seen, "", *_table(found.lines), "", text), as_json)
    return code


class Judged(NamedTuple):
    """One thing that was looked at: what came out, and if it is not ok, what that means and what to do about it.

    slow: it comes, but late; limit: lazyshard works without it, with what `means` says; missing: lazyshard must not be
    used without it.
    """

    what: str
    found: str
    verdict: Literal["ok", "slow", "limit", "missing"] = "ok"
    means: str = ""
    remedy: str = ""


class Measured(NamedTuple):
    """The types of the filesystem on both sides, what a question and its answer take, and what came out."""

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
    """Returns the exit code, what it comes to in a word, and the last line."""
    if missing := [line.what for line in lines if line.verdict == "missing"]:
        return exits.REFUSED, "unfit", f"does not fit: {'; '.join(missing)}"
    if limits := [line.what for line in lines if line.verdict != "ok"]:
        return exits.LIMITED, "limited", f"works with limits: {'; '.join(limits)}"
    return exits.DONE, "fits", "fits"


class _Sight(NamedTuple):
    kind: str  # as of `Side.look`
    name: str
    means: str  # that it is late
    remedy: str = "shorter attribute caches: NFS actimeo=1 or noac; sshfs entry_timeout, attr_timeout, dcache_timeout"


# Each in a folder of its own, so that one way of looking does not refresh what another one has cached
SIGHTS: Final = {
    "replaced, by open": _Sight(
        "open",
        "replaced/file",
        "every look of a reader at head.json is so late, and so is the word that another producer has taken over",
    ),
    "new, by open": _Sight("open", "fresh/new", "each chunk is so late"),
    "new, by open, asked for before": _Sight(
        "open",
        "asked/new",
        "so long may the start of a reader that came before its producer take; readers wait 60 s for a file",
        "shorter caches of missing names: NFS lookupcache=positive; sshfs negative_timeout=0",
    ),
    "new, by listing": _Sight(
        "list",
        "list/new",
        "so late come new chunks of directories without head.json, and consumers that --consumers does not name",
        "sshfs: dir_cache=no; NFS: actimeo=1",
    ),
}


def measure(folder: str, far: Far, longest: float, left: Callable[[str], None]) -> Measured:
    """Measures everything, in a folder made and removed below the given one. Takes about as long as the slowest sight.

    What does not show is waited for `longest` seconds; `left` is told of a folder that could not be removed.
    """
    near, name = Side(folder), f".verify-filesystem-{secrets.token_hex(4)}"
    kinds = near.hello(), far.do("hello")
    near.make(name)
    near.enter(name, ENTER_S)
    try:
        if not far.do("enter", name, ENTER_S):
            shows = f"what was made in {folder} does not show on the other side within {ENTER_S:.0f} s"
            raise Untried(f"{shows}: are both the same folder?")
        started = time.monotonic()
        far.do("look", "list", "nothing")
        round_trip = time.monotonic() - started
        return Measured(*kinds, round_trip, list(_lines(near, far, longest)))
    finally:
        # What is left does no harm, and its name says whose it was.
        with contextlib.suppress(Untried, OSError):
            far.do("clear")
        for path in near.clear()[-1:]:
            held = ", ".join(sorted(os.listdir(path))) or "nothing that this side can see"
            left(f"{path} could not be removed whole: remove it by hand (it holds {held})")


def _lines(near: Side, far: Far, longest: float) -> Iterator[Judged]:
    """Yields a line for each thing that is looked at, the most important ones first."""
    means = "nothing can be published: every file appears by a rename, most of them over an older one"
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
        ("file", "rename", "a chunk counts only once it is on the device"),
        ("directory", "", "it syncs the directory before it counts a chunk as published"),
    ):
        means, remedy = f"no producer runs here: {why}; readers can", "run the producer where it is supported"
        error = _error(near.sync, name)
        yield _unless(not error, Judged(f"fsync of a {what}", error or "no error", "missing", means, remedy))
    means = "a second producer on the other side is not refused, but takes the stream over; nothing is lost"
    remedy = "NFS: no `nolock` and no `local_lock=flock`; Lustre: mount with -o flock; else one producer a stream"
    lock = _lock(near, far)
    yield _unless(lock == "holds", Judged("flock between the two", lock, "limit", means, remedy))
    means = "two producers that create the same stream at the same moment may both think that it is theirs"
    linked, remedy = _linked_over(near, far), "start a stream's first producer alone"
    judged = Judged("hard link refuses a name that is there", linked, "limit", means, remedy)
    yield _unless(linked == "holds", judged)


def _sights(near: Side, far: Far, longest: float) -> Iterator[Judged]:
    for kind, name, *_ in SIGHTS.values():
        near.make(name.partition("/")[0])
        if name.endswith("/file"):
            near.put(name, 3)
        # The far side has asked, so that it holds what its caches hold: nothing, or the old content. Of one new file
        # it knows not even the name.
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
    # The far side remembers that the name is not there: what counts is what the server says.
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
    # Of the far side's errors only the name comes here.
    name = error_name(error) if error.errno else str(error.strerror)
    if name in ("ENOSPC", "EDQUOT"):
        raise Untried(f"there is no room left on the filesystem ({name}): make some, and try again") from error
    return name


def _unless(ok: bool, judged: Judged) -> Judged:
    return Judged(*judged[:2]) if ok else judged


def _unless_errors(errors: Mapping[str, int], what: str, found: str, begin: str = "") -> Judged:
    # ESTALE is answered by opening again.
    others = ", ".join(f"{count} {name}" for name, count in errors.items() if name != "ESTALE")
    means, remedy = "readers stop with this error", "look into the client's and the server's logs"
    return _unless(not others, Judged(what, begin + (others or found), "missing", means, remedy))


def judge_storm(storm: dict[str, Any]) -> Judged:
    """Judges reads of a file while it was replaced again and again, see `Side.storm`."""
    what, found = "rename replaces in one step", f"{storm['reads']} reads during {_REPLACEMENTS} replacements: "
    # Where 5 % of reads come cut, three tries fail once in 8,000; of few reads, on a busy machine, 3 say nothing.
    if storm["missing"] or storm["torn"] > max(3, 0.05 * storm["reads"]):
        bad = (("missing", "found nothing"), ("torn", "found half"))
        found += ", ".join(f"{storm[key]} {word}" for key, word in bad if storm[key])
        means = "a cursor that is not there for a moment looks like none: chunks that are needed could be deleted"
        return Judged(what, found, "missing", means, "another filesystem")
    if storm["back"]:
        means = "readers pass over a head that says less than an earlier one, so what is new shows later"
        return Judged(what, f"{found}{storm['back']} went back", "limit", means, "shorter or no attribute caches")
    met = f"{storm['torn']} came cut, which lazyshard reads again" if storm["torn"] else "all whole"
    if stale := storm["errors"].get("ESTALE"):
        met += f"; {stale} ESTALE, which lazyshard answers by opening again"
    return _unless_errors(storm["errors"], what, met, found)


def judge_whole(found: dict[str, dict[str, Any]]) -> Judged:
    """Judges whether renamed files show whole, by what `Side.watch` has found by label."""
    # One that was replaced may come cut, by the size that was known of it, and is read again, as in the storm: how long
    # that lasts is what is measured of it.
    torn = sum(state["torn"] for label, state in found.items() if label.startswith("new"))
    what, means = "a renamed file shows whole", "readers report chunks as damaged that are not"
    if torn:
        return Judged(what, f"{torn} looks found half", "missing", means, "another filesystem, or no caches")
    return _unless_errors(sum((Counter(state["errors"]) for state in found.values()), Counter()), what, "yes")


def judge_sight(label: str, at: float | None, waited: float) -> Judged:
    """Judges a latency: up to a second is ok, then it is slow, and past a reader's grace missing where it is needed."""
    sight = SIGHTS[label]
    found = f"not within {waited:.0f} s" if at is None else f"{at:.1f} s"
    # A look a second late is no delay for chunks that take seconds to train.
    if at is not None and at <= 1.0:
        return Judged(label, "at once" if at < 0.1 else found)
    # As long a reader waits for a file that `head.json` has named (`stream.reader.GRACE_S`).
    if sight.kind == "open" and (at is None or at > 60.0):
        means = f"{sight.means}; after 60 s readers report it as missing"
        return Judged(label, found, "missing", means, sight.remedy)
    return Judged(label, found, "limit" if at is None else "slow", sight.means, sight.remedy)
