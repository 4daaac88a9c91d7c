"""`lazyshard forget`: strikes off a consumer that will not come back, so that nothing is kept for it any more."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Final

import typer

from lazyshard.cli import exits, output
from lazyshard.cli.output import count, duration
from lazyshard.cli.status_view import checkpoint_words
from lazyshard.errors import LazyShardError
from lazyshard.format.cursor import check_consumer
from lazyshard.inspection.survey import take_survey
from lazyshard.store.urls import stream_path
from lazyshard.stream.consumers import Consumer, forget_consumer, list_consumers

ALIVE_S: Final = 600.0  # One that was heard of so lately may well be running: it marks its place once a window

EPILOG: Final = output.epilog(
    ["lazyshard forget /shared/stream sft", "lazyshard forget /shared/stream sft --yes"],
    {
        0: "forgotten, or the answer was no",
        2: "usage; there is no such directory; or nobody can be asked, and --yes is not given",
        3: "no consumer of this name; the message lists those that are there",
        5: "the stream is damaged or of a later format",
        7: "the filesystem or store failed: read-only, no permission",
    },
)


def command(
    stream: output.StreamArgument,
    name: Annotated[str, typer.Argument(metavar="NAME", help="The consumer's name, as `lazyshard status` shows it.")],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    as_json: output.JsonOption = False,
) -> Callable[[], int]:
    """Forgets a consumer that will not come back: removes its cursor and its reading hint.

    As long as a consumer is known, a producer with --retain consumed keeps every chunk that is not in its checkpoints,
    and one with --max-ahead waits for it. So a run that was given up is to be forgotten. One that is still running
    registers again with its next checkpoint, but may find its chunks deleted.
    """
    output.check_stream(stream)
    try:
        check_consumer(name)
    except ValueError as cause:
        raise typer.BadParameter(str(cause), param_hint="NAME") from cause
    return lambda: _run(stream_path(stream), name, yes, as_json)


def _run(stream: Path, name: str, yes: bool, as_json: bool) -> int:
    consumers = list_consumers(stream)
    consumer = next((one for one in consumers if one.name == name), None)
    if consumer is None:
        there = f"there are: {', '.join(one.name for one in consumers)}" if consumers else "none has registered"
        output.complain(f"{stream}: no consumer {name!r}; {there}")
        return exits.REFUSED
    # Of what --json gives nobody can tell the last line from those before it.
    for line in [*_described(stream, consumer, time.time()), _consequence(stream, consumers, name)]:
        (output.explain if as_json else output.say)(line)
    if not yes:
        if not sys.stdin.isatty():
            output.complain("there is nobody to ask: give --yes to forget it all the same; nothing was changed")
            return exits.USAGE
        print("forget it? [y/N] ", end="", file=sys.stderr, flush=True)
        yes = sys.stdin.readline().strip().lower() in ("y", "yes")
    if yes:
        forget_consumer(stream, name)
    values = {
        "stream": str(stream),
        "consumer": name,
        "forgotten": yes,
        "samples": None if consumer.cursor is None else consumer.cursor.consumed,
        "chunks_before": consumer.chunks_before,
    }
    output.say(json.dumps(values) if as_json else f"forgotten: {name}" if yes else "nothing was changed")
    return exits.DONE


def freed(consumers: Sequence[Consumer], name: str, retired: int, published: int) -> range:
    """Returns the chunks that only one consumer keeps from being deleted. The newest is never among them.

    Args:
        consumers: all of them. If there is no other, nothing is freed: without any consumer nothing may be deleted.
        name: that consumer's name.
        retired: the chunks of the half-open range [0, retired) are deleted.
        published: those of [0, published) are published.
    """
    others = [one.chunks_before for one in consumers if one.name != name]
    if not others:
        return range(0)
    start = max(retired, min(one.chunks_before for one in consumers))
    return range(start, max(start, min(*others, published - 1)))


def _described(stream: Path, consumer: Consumer, now: float) -> Iterator[str]:
    cursor, reading = consumer.cursor, consumer.reading
    ages = [max(0.0, now - file.updated_at) for file in (cursor, reading) if file is not None]
    yield f"consumer {consumer.name} of {stream}"
    if consumer.problem is not None:
        yield f"  checkpoint  not known: {consumer.problem}"
    else:
        yield f"  checkpoint  {'none' if cursor is None else checkpoint_words(cursor, ages[0])}"
    if reading is not None:
        yield f"  reading     needs {count(reading.needs_chunks, 'chunk')}; {duration(ages[-1])} old"
    if ages and min(ages) < ALIVE_S:
        running = "if it is running, it registers again with its next checkpoint, but may find its chunks deleted"
        yield f"it was heard of {duration(min(ages))} ago: {running}"


def _consequence(stream: Path, consumers: Sequence[Consumer], name: str) -> str:
    """Returns in words what forgetting a consumer does to the chunks."""
    if len(consumers) == 1:
        return "no consumer is left without it, and nothing is deleted until one registers"
    try:
        survey = take_survey(stream, time.time())
    except LazyShardError as error:
        return f"what may be deleted without it is not known: {error}"
    chunks = freed(consumers, name, survey.census.retired, survey.census.chunks)
    if not chunks:
        return "no chunk may be deleted for that: it is not the one that keeps them"
    size = survey.disk.chunk_size
    much = count(len(chunks), "chunk") + ("" if size is None else f", about {output.size(len(chunks) * size)}")
    what = output.chunk_range(chunks.start, chunks.stop)
    return f"without it, {what} may be deleted ({much}): no other consumer keeps them"
