"""`lazyshard status`: the state of a stream, as JSON or text. `lazyshard watch` shows the same."""

from __future__ import annotations

import json
import shlex
import textwrap
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from datetime import datetime, timezone
from pathlib import Path
from typing import Annotated, Any, Final

from rich.console import Console
from rich.live import Live
from rich.text import Text
from typer import Option

from lazyshard.cli import exits, output
from lazyshard.cli.output import chunk_range, count, duration, estimate, one_line, per_second, size
from lazyshard.cli.status_writers import producer_label, writers_facts, writers_summary, writers_values
from lazyshard.errors import LazyShardError, StreamMissing
from lazyshard.format.state import Cursor
from lazyshard.inspection.outlook import Band, ChunkState, ConsumerOutlook, Looks, OpenWindow, Outlook
from lazyshard.inspection.survey import Lines, take_survey
from lazyshard.stream.head import describe_silence, failure_words, is_silent
from lazyshard.stream.listing import has_unpublished_rows

INTERVAL_S: Final = 2.0
WIDTH: Final = 80
_LABEL: Final = 14
_SHOWN_CHUNKS: Final = 32  # Largest window whose chunks are listed by rank
_ROOM: Final = ("--max-disk ", "--min-free-disk ")  # Prefixes of the notes of a producer that waits for disk space

SIGNS: Final[dict[ChunkState, str]] = {
    "deleted": ".", "done": "-", "taken": "=", "reading": "#", "ready": "+", "awaited": "?",
}  # fmt: skip
_PRECEDENCE: Final[tuple[ChunkState, ...]] = ("deleted", "done", "taken", "ready", "awaited", "reading")
"""If chunks share a column, the last of their states in this order is shown, so what is read now is always visible."""

Facts = Iterator[tuple[str, str]]  # Labels and texts


def command(
    stream: output.StreamArgument,
    watch: Annotated[bool, Option("--watch", "-w", help="Refresh until Ctrl-C.")] = False,
    as_json: Annotated[bool, Option("--json", help="Print one JSON object per refresh, on one line.")] = False,
    interval: Annotated[
        float | None, Option(metavar="SECONDS", min=0.1, help=f"Between refreshes. Default: {INTERVAL_S:g}.")
    ] = None,
) -> int:
    """Shows the state of a stream: chunks, disk, producer, consumers, and when data or disk space will run out.

    Can run at any time, on any machine that sees the files; locks and changes nothing. Two observations are needed to
    tell how fast a consumer is: see [bold]--watch[/bold].

    Examples:
        lazyshard status /shared/stream
        lazyshard status /shared/stream --watch
        lazyshard status /shared/stream --json | jq .producer.state

    Exit codes:
        0  shown, whatever the state
        2  usage error; no such directory (with --watch: and no parent directory)
        3  two files have the same chunk number
        5  no stream in the directory, an incomplete one, or a later format
        7  the filesystem or store failed: no permission, no answer
        130  Ctrl-C, which ends --watch
    """
    directory = output.find_stream(stream, may_appear=watch)
    output.refuse_if(interval is not None and not watch, "--interval", "goes with --watch only")
    if watch:
        return _watch(directory, as_json, interval or INTERVAL_S)
    outlook = Looks().add(take_survey(directory, time.time()))
    output.show(status_values(outlook), status_lines(outlook, watching=False), as_json)
    return exits.DONE


def _watch(stream: Path, as_json: bool, interval: float) -> int:
    looks, console = Looks(), Console()
    width = min(WIDTH, console.width) if console.is_terminal else WIDTH

    def look() -> list[str]:
        now = time.time()
        try:
            outlook = looks.add(take_survey(stream, now, looks.lost))
        except (LazyShardError, OSError) as error:
            if as_json:
                return [json.dumps(failure_values(stream, now, str(error)))]
            missing = f"{stream}: no stream yet; it will be shown once its producer has started it"
            return [one_line(missing if isinstance(error, StreamMissing) else str(error))]
        return [json.dumps(status_values(outlook))] if as_json else status_lines(outlook, watching=True, width=width)

    live = Live(console=console, auto_refresh=False) if console.is_terminal and not as_json else None
    try:
        with live or nullcontext():
            while True:
                at = datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
                if live is not None:
                    live.update(Text("\n".join([*look(), "", f"every {interval:g} s; Ctrl-C to quit"])), refresh=True)
                else:
                    print("\n".join(look() if as_json else [at, *look(), ""]), flush=True)
                time.sleep(interval)
    except KeyboardInterrupt:
        return exits.INTERRUPTED
    except BrokenPipeError:
        # The reader of the pipe is gone.
        return exits.DONE


def status_values(outlook: Outlook) -> dict[str, Any]:
    """Returns the values of --json; unknown ones are None."""
    survey, census, band, head = outlook.survey, outlook.survey.census, outlook.band, outlook.survey.census.head
    manifest, refused = census.manifest, survey.quarantine or Lines(0, 0, True)

    def samples(chunks: float | None) -> float | None:
        return None if chunks is None or manifest is None else chunks * manifest.samples_per_chunk

    note, failed = None if head is None else head.note or None, head is not None and head.state == "failed"
    producer = head and {
        "state": outlook.state,
        "said_state": head.state,
        "host": head.host,
        "pid": head.pid,
        "process_is_gone": survey.gone,
        "process_has_ended": survey.ended,
        "heartbeat_age_s": outlook.heartbeat_age_s,
        "waits_for": None if failed else note,
        "failure": note if failed else None,
    }
    stretches = [{"first_chunk": one.first, "stop_chunk": one.stop, "state": one.state} for one in band.stretches]
    readers = ([{"consumer": name, "rank": rank} for name, rank in cell.readers] for cell in band.cells)
    cells = [cell._asdict() | {"readers": own} for cell, own in zip(band.cells, readers, strict=True)]
    return {
        **failure_values(survey.directory, survey.looked_at, None),
        "summary": summary(outlook),
        "kind": "native" if census.native else "foreign",
        "stream_id": manifest and manifest.stream_id,
        "samples_per_chunk": manifest and manifest.samples_per_chunk,
        "ended": census.ended,
        "published_chunks": census.chunks,
        "published_samples": census.samples,
        "retired_chunks": census.retired,
        "retired_samples": samples(census.retired),
        "present_chunks": census.chunks - census.retired,
        "published_chunks_per_s": outlook.chunk_rate,
        "published_samples_per_s": samples(outlook.chunk_rate),
        "used_bytes": survey.disk.size,
        "used_bytes_is_exact": survey.disk.exact,
        "free_bytes": survey.free,
        "growth_bytes_per_s": outlook.byte_rate,
        "full_in_s": outlook.full_in_s,
        "quarantined_rows": refused.lines,
        "quarantined_rows_is_exact": refused.exact,
        "quarantine_bytes": refused.size,
        "mixture": [
            {"name": one.name, "weight": one.weight, "share": one.share}
            | {"drawn_rows": one.rows, "finished": one.finished}
            for one in survey.mixture
        ],
        "band": {"stop_chunk": band.stop, "stretches": stretches, "close_up": cells},
        "producer": producer,
        **writers_values(outlook),
        "consumers": [_consumer_values(one, band.windows.get(one.consumer.name), samples) for one in outlook.consumers],
        "problems": problems(outlook),
    }


def failure_values(directory: Path, looked_at: float, error: str | None) -> dict[str, Any]:
    """Returns the values of --json after an error; `status_values` begins with the same fields."""
    # `schema` is raised when a field is removed or changes its meaning, not when one is added.
    return {"schema": 1, "directory": str(directory), "looked_at_s": looked_at, "error": error}


def _consumer_values(
    one: ConsumerOutlook, window: OpenWindow | None, samples: Callable[[float | None], float | None]
) -> dict[str, Any]:
    cursor, reading = one.consumer.cursor, one.consumer.reading
    told = {name: getattr(one, name) for name in one._fields if name not in ("consumer", "remainder")}
    blend = [
        {"stream": share.stream, "weight": share.weight, "share": given, "consumed_samples": share.consumed}
        for share, given in one.blend
    ]
    return {
        "name": one.consumer.name,
        **told,
        "ranks": reading and reading.dp_size,
        "consumed_samples": cursor and cursor.consumed,
        "chunks_before": cursor and cursor.chunks_before,
        "needs_chunks": reading and reading.needs_chunks,
        "window_first_chunk": window and window.first,
        "window_stop_chunk": window and window.stop,
        "ahead_samples": samples(one.ahead_chunks),
        "read_samples_per_s": samples(one.read_chunks_per_s),
        "blend": blend,
        "problem": one.consumer.problem,
    }


def status_lines(outlook: Outlook, *, watching: bool, width: int = WIDTH) -> list[str]:
    """Returns the report as lines. With `watching`, rates that are still unknown follow with later refreshes."""
    width, lines = max(width, 2 * _LABEL), list[str]()
    breaks: Any = {"break_long_words": False, "break_on_hyphens": False}
    for paragraph in filter(None, _page(outlook, watching, width - _LABEL)):
        lines += [""] if lines else []
        for label, text in paragraph:
            begin, further = (f"{label:{_LABEL}}", " " * _LABEL) if label else ("", "")
            lines += textwrap.wrap(one_line(text), width, initial_indent=begin, subsequent_indent=further, **breaks)
    return lines


def _page(outlook: Outlook, watching: bool, room: int) -> Iterator[list[tuple[str, str]]]:
    """Yields the report by paragraphs of (label, text); a line without a label takes the whole width."""
    yield [("", str(outlook.survey.directory)), ("", summary(outlook))]
    found, band = list(_stream_facts(outlook)), outlook.band
    found += [("band", band_line(band, room)), (" ", legend(band))] if watching and band.stop else []
    sources = ((one.name, one.share, one.rows, None if one.finished else one.weight) for one in outlook.survey.mixture)
    found += _mixed("mixture", "row", sources)
    yield found
    made_by = producer_label(outlook), _producer_state(outlook)
    yield [made_by, *((f"  {label}", text) for label, text in producer_facts(outlook))]
    yield list(writers_facts(outlook))
    unknown = "not known yet" if watching else "needs two observations; see --watch"
    for one in outlook.consumers:
        found = [("consumer", one.consumer.name)]
        found += [(f"  {label}", text) for label, text in consumer_facts(outlook, one, unknown)]
        blend = ((share.stream, given, share.consumed, share.weight) for share, given in one.blend)
        yield [*found, *_mixed("  blend", "sample", blend)]
    yield [] if outlook.consumers else [("consumers", "none has registered")]
    yield [("problem", problem) for problem in problems(outlook)]


def _stream_facts(outlook: Outlook) -> Facts:
    survey, census, about = outlook.survey, outlook.survey.census, "" if outlook.survey.disk.exact else "about "
    samples = "" if census.samples is None else f", {count(census.samples, 'sample')}"
    each = "" if census.manifest is None else f" ({census.manifest.samples_per_chunk:,} a chunk)"
    end = f"{'ended' if census.ended else 'live'}{'' if census.native else '; made by a foreign producer'}"
    yield "published", f"{count(census.chunks, 'chunk')}{samples}{each}; {end}"
    if census.retired:
        yield "deleted", f"{count(census.retired, 'chunk')}; {census.chunks - census.retired:,} present"
    free = "" if survey.free is None else f", {size(survey.free)} free"
    full = "" if outlook.full_in_s is None else f"; full in {estimate(outlook.full_in_s)} at this rate"
    yield "disk", f"{about}{size(survey.disk.size)} used{free}{full}"
    if (refused := survey.quarantine) is not None:
        rows = f"{'' if refused.exact else 'about '}{count(refused.lines, 'row')} refused so far"
        yield "quarantine", f"{rows}, {size(refused.size)}"


def _producer_state(outlook: Outlook) -> str:
    survey, head = outlook.survey, outlook.survey.census.head
    if head is None or outlook.state is None:
        return "unknown"
    if outlook.state != "running" or not is_silent(head, survey.looked_at):
        return outlook.state
    open_rows = None if head.open else has_unpublished_rows(survey.directory, head.chunks)
    return f"{outlook.state}, but {describe_silence(head, survey.looked_at, 0.0, open_rows)}"


def producer_facts(outlook: Outlook) -> Facts:
    """Yields facts about the producer, except for its state."""
    survey, head, grows = outlook.survey, outlook.survey.census.head, ""
    if head is not None:
        unseen = survey.gone and outlook.state in ("running", "waiting", "dead")
        gone = "; no such process on this machine" if unseen else ""
        gone = "; it has ended" if survey.ended and outlook.state == "dead" else gone
        age = duration(outlook.heartbeat_age_s or 0.0)
        when = f"ended {age} ago" if outlook.state == "finished" else f"heartbeat {age} old"
        yield "process", f"{head.pid} on {head.host}, {when}{gone}"
    if outlook.byte_rate:
        verb = "grows" if outlook.byte_rate > 0 else "shrinks"
        grows = f"; the stream {verb} by {size(abs(outlook.byte_rate))}/s"
    yield "rate", (rate_words(outlook, outlook.chunk_rate) or "not known") + told_words(outlook) + grows


def rate_words(outlook: Outlook, chunks: float | None) -> str | None:
    """Returns a rate of chunks as text, in samples if the chunk size is known; None for None."""
    manifest = outlook.survey.census.manifest
    each, noun = (1, "chunks") if manifest is None else (manifest.samples_per_chunk, "samples")
    return None if chunks is None else per_second(chunks * each, noun)


def told_words(outlook: Outlook) -> str:
    """Returns the age of the producer's last reported rate, or nothing if it is recent."""
    age = outlook.heartbeat_age_s or 0.0  # Producers report their rate every 5 s
    return f", reported {duration(age)} ago" if outlook.chunk_rate and age > 10.0 else ""


def consumer_facts(outlook: Outlook, one: ConsumerOutlook, unknown: str = "not known yet") -> Facts:
    """Yields facts about a consumer; `unknown` is the text for an unknown rate."""
    cursor, reading, age = one.consumer.cursor, one.consumer.reading, one.reading_age_s or 0.0
    checkpoint = "none yet" if cursor is None else checkpoint_words(cursor, one.checkpoint_age_s or 0.0)
    yield "checkpoint", checkpoint if one.consumer.problem is None else "unknown, see the problem"
    trained_all = outlook.survey.census.ended and one.lag_samples == 0
    if one.lag_samples is not None:
        # The run itself has usually read further.
        yield "lag", f"{count(one.lag_samples, 'sample')} not in a checkpoint"
    if one.lag_chunks:
        old = "" if one.lag_s is None else f", the oldest {duration(one.lag_s)} old"
        yield "keeps", f"{count(one.lag_chunks, 'chunk')} from deletion{old}"
    window, published = outlook.band.windows.get(one.consumer.name), outlook.survey.census.chunks
    if reading is not None and one.ahead_chunks is not None and not trained_all:
        # The last chunk that it needs, which its ranks name in their logs too.
        ahead = f", waits for chunk {published - one.ahead_chunks - 1:,}"
        ahead = f", {count(one.ahead_chunks, 'chunk')} ahead of it" if one.ahead_chunks >= 0 else ahead
        # A stream that has ended holds all its chunks, even if the last window is not full.
        ahead = "" if outlook.survey.census.ended else ahead
        yield "reading", f"needs {count(reading.needs_chunks, 'chunk')}{ahead}; {duration(age)} old"
    if window is not None:
        # A reader with an older hint has ended or waits; it is not reading now.
        reads = "reads now" if age <= 600.0 else "read last"
        yield reads if window.stop <= published else "waits for", window_words(window, published)
    supply = "; will not have to wait at these rates" if one.supply == "steady" else ""
    if one.supply == "shrinking":
        supply = f"; will have to wait in {estimate(one.starving_in_s or 0.0)} at these rates"
    yield "rate", (rate_words(outlook, one.read_chunks_per_s) or unknown) + supply


def checkpoint_words(cursor: Cursor, age_s: float) -> str:
    """Returns the progress and age of a consumer's checkpoint."""
    done = count(cursor.chunks_before, "chunk")
    return f"{count(cursor.consumed, 'sample')}, done with {done}; {duration(age_s)} old"


def band_line(band: Band, width: int) -> str:
    """Returns the band as at most `width` characters."""
    columns = min(width, band.stop)
    shown = [0] * columns
    for one in band.stretches:
        for column in range(one.first * columns // band.stop, (one.stop - 1) * columns // band.stop + 1):
            shown[column] = max(shown[column], _PRECEDENCE.index(one.state))
    return "".join(SIGNS[_PRECEDENCE[number]] for number in shown)


def legend(band: Band) -> str:
    """Returns the meaning of each character in the band's line."""
    there = [name for name in SIGNS if name in {one.state for one in band.stretches}]
    return ", ".join(f"{SIGNS[name]} {'read now' if name == 'reading' else name}" for name in there)


def window_words(window: OpenWindow, published: int) -> str:
    """Returns which chunks a consumer reads, by rank, and for the last of which it still waits."""
    words, by_rank = chunk_range(window.first, window.stop), dict[int | None, list[str]]()
    if published < window.stop:
        words = f"chunk {window.stop - 1:,}, to read {words}"
    for chunk in range(window.first, min(window.stop, window.first + _SHOWN_CHUNKS + 1)):
        by_rank.setdefault(window.rank(chunk), []).append(f"{chunk:,}")
    if window.stop - window.first > _SHOWN_CHUNKS or len(by_rank) > 8:
        return f"{words}, by {count(window.dp, 'rank')}"
    ranks = sorted(by_rank.items(), key=lambda item: (item[0] is None, item[0] or 0))
    parts = [f"{'shared by ranks' if rank is None else f'rank {rank}'}: {', '.join(found)}" for rank, found in ranks]
    return f"{words} ({'; '.join(parts)})"


def _mixed(label: str, noun: str, parts: Iterable[tuple[str, float | None, int, float | None]]) -> Facts:
    """Yields the share so far and the target weight of each source or stream; one without a weight is finished."""
    for name, share, amount, weight in parts:
        given = "none yet" if share is None else f"{share:.1%}, {count(amount, noun)}"
        yield label, f"{one_line(name)}: {given}; {'finished' if weight is None else f'weight {weight:.1%}'}"
        label = " "


def summary(outlook: Outlook) -> str:
    """Returns a sentence on what is happening."""
    gone = ", ".join(map(repr, outlook.gone))
    last = gone and f"the last run of {gone} no longer exists on this machine: resume it, unless another one reads"
    return "; ".join(filter(None, (_of_producer(outlook), writers_summary(outlook), _of_readers(outlook), last)))


def problems(outlook: Outlook) -> list[str]:
    """Returns the problems, one sentence each."""
    survey, retired = outlook.survey, outlook.survey.census.retired
    found = list(survey.problems)
    for one in survey.consumers:
        if one.problem is not None:
            forget = f"lazyshard forget {shlex.quote(str(survey.directory))} {shlex.quote(one.name)}"
            what = "it counts as done with no chunk, so none is deleted: fix that, or, if it will not return, run"
            found.append(f"consumer {one.name!r}: {one.problem}; {what} `{forget}`")
        elif one.cursor is not None and one.chunks_before < retired:
            but = f"{retired:,} {'is' if retired == 1 else 'are'} deleted, so it cannot continue"
            found.append(f"consumer {one.name!r}: is done with only {count(one.chunks_before, 'chunk')}, but {but}")
    if outlook.clock_ahead_s > 5.0:
        ahead = duration(outlook.clock_ahead_s)
        found.append(f"the producer's clock is {ahead} ahead of this machine's, so the ages are wrong")
    return found


def _of_producer(outlook: Outlook) -> str:
    survey, head, age = outlook.survey, outlook.survey.census.head, duration(outlook.heartbeat_age_s or 0.0)
    if survey.census.ended:
        return "the stream has ended"
    who = producer_label(outlook)
    if head is None:
        return f"the state of the {who} is unknown"
    again = "start it again" if who == "producer" else "start a writer that has not ended"
    # Free disk space first, if the next chunk does not fit or the producer was waiting for space.
    if survey.free is not None and survey.free < (survey.disk.chunk_size or 1.0):
        again = f"the disk is full, free some space and {again}"
    elif head.state == "waiting" and head.note.removeprefix("deadlock: ").startswith(_ROOM):
        again = f"free some space, for which it waited ({head.note}), and {again}"
    there = f"process {head.pid} exists: continue it (kill -CONT), or end it and " if survey.gone is False else ""
    sign = f"no heartbeat for {age}{' and its process is gone' if survey.gone else ''}: {there}"
    what = failure_words(head.note) if head.note else "check its log, start it again"
    # `_of_readers` then says how far ahead it is, which implies that it is running.
    told = outlook.slowest is not None and all(one.supply != "dry" for one in outlook.consumers)
    sentences: dict[str | None, str] = {
        "dead": f"is dead, {'its process has ended: ' if survey.ended else sign}{again}, it continues where it stopped",
        "failed": f"failed {age} ago: {what}",
        "idle": f"was stopped {age} ago: {again} to continue",
        "waiting": f"waits: {head.note}" if head.note else "waits",
    }
    sentence = sentences.get(outlook.state, "" if told else "is running")
    return f"the {who} {sentence}" if sentence else ""


def _of_readers(outlook: Outlook) -> str:
    head, consumers, slowest = outlook.survey.census.head, outlook.consumers, outlook.slowest
    told = outlook.state == "waiting" and head is not None and head.note  # It says how far ahead of whom it is
    if not consumers:
        return "" if told else "no consumer has registered (a run with consumer=NAME does)"
    if outlook.survey.census.ended:
        known = all(one.lag_chunks is not None for one in consumers)
        return _behind(outlook) or ("every consumer is done with it" if known else "")
    if dry := [one for one in consumers if one.supply == "dry"]:
        last = outlook.survey.census.chunks - 1
        waits = ", ".join(f"{one.consumer.name!r} for chunk {last - (one.ahead_chunks or 0):,}" for one in dry)
        return f"waiting for data: {waits}"
    if told or slowest is None:
        return "" if told else _behind(outlook)
    ahead = count(slowest.ahead_chunks or 0, "chunk")
    return f"the {producer_label(outlook)} is {ahead} ahead of the slowest reader, {slowest.consumer.name!r}"


def _behind(outlook: Outlook) -> str:
    """Returns which consumer is furthest behind, or what one that has trained everything still keeps; or nothing."""
    behind = [one for one in outlook.consumers if one.lag_chunks]
    last = max(behind, key=lambda one: (one.remainder is None, one.lag_chunks, one.consumer.name), default=None)
    if last is None:
        return ""
    name, first = last.consumer.name, last.consumer.chunks_before
    if (left := last.remainder) is None:
        return f"{name!r} is furthest behind, its checkpoints by {count(last.lag_chunks or 0, 'chunk')}"
    which = "" if outlook.survey.census.ended else " that is published"
    which = " that its max_total_samples lets it take" if left.limited else which
    but = f"{which} but {count(left.samples, 'sample')}, fewer than its next step takes" if left.samples else ""
    why = "as long as it is registered" if left.limited else "for an older checkpoint or another epoch"
    kept = f", and keeps {chunk_range(first, left.keeps)} {why}" if left.keeps > first else ""
    return f"{name!r} has trained all{but or which or ' of it'}{kept}"
