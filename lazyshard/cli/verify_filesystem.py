"""`lazyshard verify-filesystem`: whether lazyshard can use a filesystem that two mounts or two machines share."""

from __future__ import annotations

import json
import math
import shlex
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Final, Literal, NamedTuple

import typer

from lazyshard.cli import exits
from lazyshard.cli.output import JsonOption, complain, epilog, explain, say
from lazyshard.filesystem.measuring import NAME_LENGTHS, REPLACEMENTS, Far, Sightings, Untried, measure
from lazyshard.filesystem.side import serve

_Verdict = Literal["ok", "slow", "limit", "missing"]
"""ok: as it should be; slow: it comes, but late; limit: lazyshard works without it, with what `means` says; missing:
lazyshard must not be used without it."""

_SOON_S: Final = 1.0  # A look a second late is no delay for chunks that take seconds to train
_GRACE_S: Final = 60.0  # How long a reader waits for a file that `head.json` has named (`stream.reader.GRACE_S`)
_MOST_TORN: Final = 0.05  # Share of reads while a file is replaced again and again: three tries fail once in 8,000
_FEW_TORN: Final = 3  # So many say nothing about a share: on a busy machine there are not a hundred reads
_LONGEST_NAME: Final = 226
_LEAST_NAME: Final = 64  # Bytes of the longest name of a consumer, and of a seal, under their temporary names
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
        return lambda: serve(serving)
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
        say(json.dumps(facts | {"lines": [line._asdict() for line in lines]}))
    else:
        for shown_line in (*_table(measured, lines, near, shown), "", text):
            say(shown_line)
    return _CODES[verdict]


def _table(measured: Sightings, lines: Sequence[Judged], near: str, far: str) -> list[str]:
    left, indent = max(len(line.what) for line in lines), " " * 11
    shown = [
        f"changes in {near} ({measured.near or 'unknown'}), seen from {far} ({measured.far or 'unknown'}); a question "
        f"there and back takes {1000 * measured.round_trip_s:.1f} ms",
        "",
    ]
    for line in lines:
        shown.append(f"{line.verdict:8} {line.what:{left}}  {line.found}")
        for text in (line.means, f"-> {line.remedy}" if line.remedy else ""):
            shown += textwrap.wrap(text, 115, initial_indent=indent, subsequent_indent=indent)
    return shown


class Judged(NamedTuple):
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
    return [*_reading(measured), *_sights(measured), *_operations(measured)]


def _unless(ok: bool, what: str, found: str, verdict: _Verdict, means: str, remedy: str) -> Judged:
    return Judged(what, found) if ok else Judged(what, found, verdict, means, remedy)


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


def _reading(measured: Sightings) -> Iterator[Judged]:
    what, storm = "rename replaces in one step", measured.storm
    found = f"{storm['reads']} reads during {REPLACEMENTS} replacements: "
    bad = [f"{storm[key]} {word}" for key, word in (("missing", "found nothing"), ("torn", "found half")) if storm[key]]
    stale = storm["errors"].get("ESTALE", 0)
    met = f"{storm['torn']} came cut, which lazyshard reads again" if storm["torn"] else "all whole"
    met += f"; {stale} ESTALE, which lazyshard answers by opening again" if stale else ""
    stop = "readers stop with this error"
    if storm["missing"] or storm["torn"] > max(_FEW_TORN, _MOST_TORN * storm["reads"]):
        means = (
            "a cursor or the head that is not there for a moment looks like one that was never written: chunks that a "
            "consumer needs could be deleted"
        )
        yield Judged(what, found + ", ".join(bad), "missing", means, "another filesystem")
    elif storm["back"]:
        means = "readers pass over a head that says less than an earlier one, so what is new shows later"
        yield Judged(what, f"{found}{storm['back']} went back", "limit", means, "shorter or no attribute caches")
    else:
        errors = _others(storm["errors"])
        yield _unless(not errors, what, found + (errors or met), "missing", stop, _LOGS)
    what, errors, means = "a renamed file shows whole", _others(measured.errors), "readers report chunks as damaged"
    if measured.torn:
        found = f"{measured.torn} looks found half"
        yield Judged(what, found, "missing", f"{means} that are not", "another filesystem, or no caches")
    else:
        yield _unless(not errors, what, errors or "yes", "missing", stop, _LOGS)


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
    found = f"not within {measured.waited_s:.0f} s" if at is None else f"{at:.1f} s"
    if at is not None and at < 0.1 + 2 * measured.round_trip_s:
        found = "at once"
    late = math.inf if at is None else at
    if late <= _SOON_S:
        return Judged(label, found)
    if needed and late > _GRACE_S:
        return Judged(label, found, "missing", f"{means}; after 60 s readers report it as missing", remedy)
    return Judged(label, found, "limit" if at is None else "slow", means, remedy)


def _operations(measured: Sightings) -> Iterator[Judged]:
    for what, error, why in (
        ("file", measured.sync_file, "a chunk counts only once it is on the device"),
        ("directory", measured.sync_folder, "it syncs the directory before it counts a chunk as published"),
    ):
        means = f"no producer runs here: {why}; readers can"
        remedy = "run the producer where it is supported, as on the server"
        yield _unless(not error, f"fsync of a {what}", error or "no error", "missing", means, remedy)
    means = (
        "a second producer on the other side is not refused: it takes the stream over, and the first one stops at its "
        "next chunk. Nothing is lost, but see to it that only one is started"
    )
    remedy = "NFS: no `nolock` and no `local_lock=flock`; Lustre: mount with -o flock; else one producer a stream"
    yield _unless(measured.lock == "holds", "flock between the two", measured.lock, "limit", means, remedy)
    what = "hard link refuses a name that is there"
    means = "two producers that create the same stream at the same moment may both think that it is theirs"
    found = {False: "holds", None: "no hard links", True: "replaced the file"}[measured.linked_over]
    remedy = "start a stream's first producer alone"
    yield _unless(measured.linked_over is False, what, found, "limit", means, remedy)
    known = {"read on": "can be read on", "ESTALE": "ESTALE, which lazyshard answers by opening it again"}
    means = "a reader that has a chunk open when it is deleted stops with this error"
    remedy = "with `--retain consumed`: keep some chunks, `--retain N`"
    for word, met in (("removed", measured.unlinked), ("replaced", measured.replaced)):
        what = f"file that is {word} while open"
        yield _unless(met in known, what, known.get(met, met), "limit", means, remedy)
    what, length = "length of names", measured.longest_name
    found = f"{length} bytes" if length else f"less than {NAME_LENGTHS[-1]} bytes"
    if length >= _LEAST_NAME:
        means = f"names of consumers may have {length - (_LONGEST_NAME - 200)} bytes at the most, not 200"
        yield _unless(length >= _LONGEST_NAME, what, found, "limit", means, "short names of consumers")
    else:
        yield Judged(what, found, "missing", "the files of a stream cannot be made", "another filesystem")
