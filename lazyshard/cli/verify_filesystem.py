"""`lazyshard verify-filesystem`: whether lazyshard can use a filesystem that two mounts or two machines share."""

from __future__ import annotations

import json
import shlex
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Final, Literal

import typer

from lazyshard.cli import exits
from lazyshard.cli.output import JsonOption, complain, epilog, explain, say
from lazyshard.filesystem.measuring import NAME_LENGTHS, REPLACEMENTS, Far, Sightings, Untried, measure
from lazyshard.filesystem.side import serve

_Verdict = Literal["ok", "slow", "limit", "missing"]
"""ok: as it should be; slow: it comes, but late; limit: lazyshard works without it, with what `means` says; missing:
lazyshard must not be used without it."""

_SOON_S: Final = 1.0
"""A look a second late is no delay for chunks that take seconds to train."""

_GRACE_S: Final = 60.0
"""How long a reader waits for a file that `head.json` has named (`lazyshard.stream.reader.GRACE_S`)."""

_MOST_TORN: Final = 0.05
"""Share of reads of a file that is being replaced as fast as it can be. Three tries fail once in 8,000 then, and in
practice files are replaced seconds apart."""

_FEW_TORN: Final = 3
"""So many say nothing about a share: on a busy machine there are not a hundred reads."""

_LONGEST_NAME: Final = 226
"""Bytes: `.NAME.reading.TOKEN` of a consumer whose name has the 200 bytes that it may have."""

_LEAST_NAME: Final = 64
"""Bytes: the seal of a chunk under the temporary name of its writer."""

_CACHES: Final = "shorter attribute caches: NFS actimeo=1 or noac; sshfs entry_timeout, attr_timeout, dcache_timeout"
_LOGS: Final = "look into the client's and the server's logs"

HELP: Final = """Tells whether lazyshard can use a filesystem that two mounts or two machines share.

Changes are made in A and looked at from the other side: B, the same folder on a second mount of this machine, or what
--far starts on another machine. With A alone two processes use one mount. Says of each thing that lazyshard's protocol
needs whether it holds, what it costs, and what to set. Works in a folder of its own and removes it."""

EPILOG: Final = epilog(
    [
        "lazyshard verify-filesystem /data/folder",
        "lazyshard verify-filesystem /mnt/a/folder /mnt/b/folder",
        'lazyshard verify-filesystem /share/folder --far "ssh node2 lazyshard verify-filesystem --serve /share/folder"',
    ],
    {
        0: "the filesystem fits",
        1: "it works with limits, which are printed; or typer or rich is missing: pip install 'lazyshard\\[cli]'",
        2: "usage; there is no such folder",
        3: "it does not fit",
        4: "it could not be tried: a folder cannot be written, the two are not the same one, the other side did "
        "not answer",
    },
)

_CODES: Final = {"fits": exits.DONE, "limited": exits.LIMITED, "unfit": exits.REFUSED}


def command(
    near: Annotated[str | None, typer.Argument(metavar="A", help="A folder on the first mount.")] = None,
    second: Annotated[
        str | None, typer.Argument(metavar="B", help="The same folder on the second mount. Default: A.")
    ] = None,
    far: Annotated[
        str | None,
        typer.Option(metavar="COMMAND", help="Starts the other side on another machine: ssh, srun, kubectl exec -i."),
    ] = None,
    serving: Annotated[
        str | None, typer.Option("--serve", metavar="FOLDER", help="Be the other side, for --far.")
    ] = None,
    longest: Annotated[float, typer.Option(metavar="SECONDS", help="How long to wait for what does not show.")] = 90.0,
    as_json: JsonOption = False,
) -> Callable[[], int]:
    """Returns what is to be done; see `lazyshard.cli.command`."""
    for folder, hint in ((near, "A"), (second, "B"), (serving, "--serve")):
        if folder is not None and not Path(folder).is_dir():
            raise typer.BadParameter(f"{folder}: expected a folder on a filesystem, found none", param_hint=hint)
    if serving is not None:
        if near is not None or far is not None:
            raise typer.BadParameter("stands alone", param_hint="--serve")
        return lambda: _serve(serving)
    if near is None:
        raise typer.BadParameter("give a folder, twice where it is mounted twice", param_hint="A")
    if far is not None and second is not None:
        raise typer.BadParameter("give B or --far, not both", param_hint="--far")
    if not longest > 0:
        raise typer.BadParameter(f"more than 0 seconds, got {longest}", param_hint="--longest")
    here = [sys.executable, "-m", "lazyshard.filesystem.side", second or near]
    try:
        other = here if far is None else shlex.split(far)
    except ValueError as cause:
        raise typer.BadParameter(f"{far}: {cause}", param_hint="--far") from cause
    if not other:
        raise typer.BadParameter("expected a command, found none", param_hint="--far")
    return lambda: _run(near, other, far or second or near, longest, as_json)


def _serve(folder: str) -> int:
    serve(folder)
    return exits.DONE


def _run(near: str, other: Sequence[str], shown: str, longest: float, as_json: bool) -> int:
    try:
        with Far(other) as far:
            measured = measure(near, far, longest, explain)
    except (Untried, OSError) as error:
        complain(f"it could not be tried: {error}")
        return exits.UNTRIED
    lines = judge(measured)
    verdict, text = conclude(lines)
    if as_json:
        facts = {"verdict": verdict, "text": text, "measured": asdict(measured)}
        say(json.dumps(facts | {"lines": [asdict(line) for line in lines]}))
    else:
        for shown_line in (*_table(measured, lines, near, shown), "", text):
            say(shown_line)
    return _CODES[verdict]


def _table(measured: Sightings, lines: Sequence[Judged], near: str, far: str) -> list[str]:
    left = max(len(line.what) for line in lines)
    shown = [
        f"changes in {near} ({measured.near or 'unknown'}), seen from {far} ({measured.far or 'unknown'}); a question "
        f"there and back takes {1000 * measured.round_trip_s:.1f} ms",
        "",
    ]
    for line in lines:
        shown.append(f"{line.verdict:8} {line.what:{left}}  {line.found}")
        for text in (line.means, f"-> {line.remedy}" if line.remedy else ""):
            if text:
                shown += textwrap.wrap(text, 115, initial_indent=" " * 11, subsequent_indent=" " * 11)
    return shown


@dataclass(frozen=True)
class Judged:
    """One thing that was looked at: what came out, and if it is not ok, what that means and what to do about it."""

    what: str
    found: str
    verdict: _Verdict = "ok"
    means: str = ""
    remedy: str = ""


def judge(measured: Sightings) -> list[Judged]:
    """Returns a line for each thing that was looked at, the most important ones first."""
    if measured.rename:
        means = "nothing can be published: every file appears by a rename, most of them over an older one"
        remedy = "sshfs: a server with posix-rename (OpenSSH has it), no `-o workaround=...`; else another filesystem"
        return [Judged("rename over an existing file", measured.rename, "missing", means, remedy)]
    return [
        _replacing(measured),
        _whole(measured),
        *_sights(measured),
        _syncing("file", measured.sync_file, "a chunk counts only once it is on the device"),
        _syncing("directory", measured.sync_folder, "it syncs the directory before it counts a chunk as published"),
        _lock(measured.lock),
        _links(measured.linked_over),
        _held("file that is removed while open", measured.unlinked),
        _held("file that is replaced while open", measured.replaced),
        _names(measured.longest_name),
    ]


def conclude(lines: list[Judged]) -> tuple[Literal["fits", "limited", "unfit"], str]:
    """Returns what it comes to, and the last line."""
    if missing := [line.what for line in lines if line.verdict == "missing"]:
        return "unfit", f"does not fit: {'; '.join(missing)}"
    if limits := [line.what for line in lines if line.verdict != "ok"]:
        return "limited", f"works with limits: {'; '.join(limits)}"
    return "fits", "fits"


def _others(errors: Mapping[str, int]) -> str:
    """Returns the errors but for ESTALE, which lazyshard answers by opening again."""
    return ", ".join(f"{count} {name}" for name, count in errors.items() if name != "ESTALE")


def _replacing(measured: Sightings) -> Judged:
    what, storm = "rename replaces in one step", measured.storm
    found = f"{storm['reads']} reads during {REPLACEMENTS} replacements"
    bad = [f"{storm[key]} {word}" for key, word in (("missing", "found nothing"), ("torn", "found half")) if storm[key]]
    if storm["missing"] or storm["torn"] > max(_FEW_TORN, _MOST_TORN * storm["reads"]):
        means = (
            "a cursor or the head that is not there for a moment looks like one that was never written: chunks that a "
            "consumer needs could be deleted"
        )
        return Judged(what, f"{found}: {', '.join(bad)}", "missing", means, "another filesystem")
    if storm["back"]:
        means = "readers pass over a head that says less than an earlier one, so what is new shows later"
        return Judged(what, f"{found}: {storm['back']} went back", "limit", means, "shorter or no attribute caches")
    if errors := _others(storm["errors"]):
        return Judged(what, f"{found}: {errors}", "missing", "readers stop with this error", _LOGS)
    stale = storm["errors"].get("ESTALE", 0)
    met = [f"{storm['torn']} came cut, which lazyshard reads again"] if storm["torn"] else ["all whole"]
    met += [f"{stale} ESTALE, which lazyshard answers by opening again"] if stale else []
    return Judged(what, f"{found}: {'; '.join(met)}")


def _whole(measured: Sightings) -> Judged:
    what = "a renamed file shows whole"
    if measured.torn:
        means = "readers report chunks as damaged that are not"
        return Judged(what, f"{measured.torn} looks found half", "missing", means, "another filesystem, or no caches")
    if errors := _others(measured.errors):
        return Judged(what, errors, "missing", "readers stop with this error", _LOGS)
    return Judged(what, "yes")


def _sights(measured: Sightings) -> list[Judged]:
    names = "shorter caches of missing names: NFS lookupcache=positive; sshfs negative_timeout=0"
    head = "every look of a reader at head.json is so late, and so is the word that another producer has taken over"
    early = "so long may the start of a reader that came before its producer take; readers wait 60 s for a file"
    starts = (
        "so late come new chunks of directories without head.json, and consumers that the producer was not told of "
        "with --consumers; what a producer that goes on after one elsewhere must know it asks for by name"
    )
    rows = "rows that are added to a followed source are so late"
    return [
        _sight(measured, "replaced, by open", head, _CACHES),
        _sight(measured, "new, by open", "each chunk is so late", _CACHES),
        _sight(measured, "new, by open, asked for before", early, names),
        _sight(measured, "new, by listing", starts, "sshfs: dir_cache=no; NFS: actimeo=1", needed=False),
        _sight(measured, "grown, by open", rows, _CACHES, needed=False),
    ]


def _sight(measured: Sightings, label: str, means: str, remedy: str, *, needed: bool = True) -> Judged:
    """Judges one latency: up to `SOON_S` is ok, then it is slow, and past `GRACE_S` missing where it is needed."""
    at = measured.seen[label]
    found = _seconds(measured, at)
    if at is not None and at <= _SOON_S:
        return Judged(label, found)
    if not needed:
        return Judged(label, found, "slow" if at is not None else "limit", means, remedy)
    if at is not None and at <= _GRACE_S:
        return Judged(label, found, "slow", means, remedy)
    return Judged(label, found, "missing", f"{means}; after 60 s readers report it as missing", remedy)


def _seconds(measured: Sightings, at: float | None) -> str:
    if at is None:
        return f"not within {measured.waited_s:.0f} s"
    return "at once" if at < 0.1 + 2 * measured.round_trip_s else f"{at:.1f} s"


def _syncing(what: str, error: str, why: str) -> Judged:
    if not error:
        return Judged(f"fsync of a {what}", "no error")
    means = f"no producer runs here: {why}; readers can"
    remedy = "run the producer where it is supported, as on the server"
    return Judged(f"fsync of a {what}", error, "missing", means, remedy)


def _lock(found: str) -> Judged:
    if found == "holds":
        return Judged("flock between the two", found)
    means = (
        "a second producer on the other side is not refused: it takes the stream over, and the first one stops at its "
        "next chunk. Nothing is lost, but see to it that only one is started"
    )
    remedy = "NFS: no `nolock` and no `local_lock=flock`; Lustre: mount with -o flock; else one producer a stream"
    return Judged("flock between the two", found, "limit", means, remedy)


def _links(linked_over: bool | None) -> Judged:
    what = "hard link refuses a name that is there"
    if linked_over is False:
        return Judged(what, "holds")
    means = "two producers that create the same stream at the same moment may both think that it is theirs"
    found = "no hard links" if linked_over is None else "replaced the file"
    return Judged(what, found, "limit", means, "start a stream's first producer alone")


def _held(what: str, found: str) -> Judged:
    if found == "read on":
        return Judged(what, "can be read on")
    if found == "ESTALE":
        return Judged(what, "ESTALE, which lazyshard answers by opening it again")
    means = "a reader that has a chunk open when it is deleted stops with this error"
    return Judged(what, found, "limit", means, "with `--retain consumed`: keep some chunks, `--retain N`")


def _names(length: int) -> Judged:
    what, found = "length of names", f"{length} bytes" if length else f"less than {NAME_LENGTHS[-1]} bytes"
    if length >= _LONGEST_NAME:
        return Judged(what, found)
    if length >= _LEAST_NAME:
        means = f"names of consumers may have {length - (_LONGEST_NAME - 200)} bytes at the most, not 200"
        return Judged(what, found, "limit", means, "short names of consumers")
    return Judged(what, found, "missing", "the files of a stream cannot be made", "another filesystem")
