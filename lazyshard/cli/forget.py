"""`lazyshard forget`: removes a consumer that will not return, so that no chunks are kept for it."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from lazyshard.cli import exits, output
from lazyshard.cli.status import checkpoint_words
from lazyshard.errors import ConfigInvalid, LazyShardError
from lazyshard.inspection.survey import take_survey
from lazyshard.stream.cursor import Consumer, forget_consumer, list_consumers


def command(
    stream: output.StreamArgument,
    name: Annotated[str, Argument(metavar="NAME", help="The consumer's name, as `lazyshard status` shows it.")],
    yes: Annotated[bool, Option("--yes", "-y", help="Do not ask for confirmation.")] = False,
    as_json: output.JsonOption = False,
) -> int:
    """Forgets a consumer that will not return: removes its cursor and its reading hint.

    As long as a consumer is registered, a producer with --retain consumed keeps every chunk that its checkpoints do not
    cover, and a producer with --max-ahead waits for it. Forget a run that was given up. A run that is still running
    registers again with its next checkpoint, but may find its chunks deleted.

    Examples:
        lazyshard forget /shared/stream sft
        lazyshard forget /shared/stream sft --yes

    Exit codes:
        0  forgotten, or the answer was no
        2  usage error; no such directory; or no terminal to ask for confirmation, and no --yes
        3  no consumer of this name; the message lists the consumers
        5  the stream is damaged or has a later format
        7  the filesystem or store failed: read-only, no permission
    """
    directory = output.find_stream(stream)
    output.check_name(name, "NAME")
    consumers = list_consumers(directory)
    consumer = next((one for one in consumers if one.name == name), None)
    if consumer is None:
        there = f"registered: {', '.join(one.name for one in consumers)}" if consumers else "none has registered"
        raise ConfigInvalid(f"{directory}: no consumer {name!r}; {there}")
    # With --json stdout holds only the result.
    for line in list(_lines(directory, consumers, consumer, time.time())):
        (output.explain if as_json else output.say)(line)
    if not yes:
        if not sys.stdin.isatty():
            output.complain("stdin is no terminal, cannot ask for confirmation: give --yes; nothing was changed")
            return exits.USAGE
        print("forget it? [y/N] ", end="", file=sys.stderr, flush=True)
        yes = sys.stdin.readline().strip().lower() in ("y", "yes")
    if yes:
        forget_consumer(directory, name)
    values = {"stream": str(directory), "consumer": name, "forgotten": yes, "chunks_before": consumer.chunks_before}
    values |= {"samples": None if consumer.cursor is None else consumer.cursor.consumed}
    output.show(values, [f"forgotten: {name}" if yes else "nothing was changed"], as_json)
    return exits.DONE


def freed(consumers: Sequence[Consumer], name: str, retired: int, published: int) -> range:
    """Returns the published chunks, without the newest, that only this consumer keeps from being deleted.

    Returns none if there is no other consumer: without consumers nothing may be deleted.
    """
    others = [one.chunks_before for one in consumers if one.name != name]
    if not others:
        return range(0)
    start = max(retired, min(one.chunks_before for one in consumers))
    return range(start, max(start, min(*others, published - 1)))


def _lines(stream: Path, consumers: Sequence[Consumer], consumer: Consumer, now: float) -> Iterator[str]:
    """Yields lines on a consumer, and which chunks may be deleted without it."""
    cursor, reading, name = consumer.cursor, consumer.reading, consumer.name
    ages = [max(0.0, now - file.updated_at) for file in (cursor, reading) if file is not None]
    checkpoint = "none" if cursor is None else checkpoint_words(cursor, ages[0])
    checkpoint = checkpoint if consumer.problem is None else f"unknown: {consumer.problem}"
    yield from (f"consumer {name} of {stream}", f"  checkpoint  {checkpoint}")
    if reading is not None:
        yield f"  reading     needs {output.count(reading.needs_chunks, 'chunk')}; {output.duration(ages[-1])} old"
    # A consumer with recent files may be running: it writes its reading hint once per window.
    if ages and min(ages) < 600.0:
        running = "if it is running, it registers again with its next checkpoint, but may find its chunks deleted"
        yield f"it was last active {output.duration(min(ages))} ago: {running}"
    if len(consumers) == 1:
        yield "it is the only consumer, and without consumers no chunk is deleted until one registers"
        return
    try:
        survey = take_survey(stream, now)
    except LazyShardError as error:
        yield f"cannot determine which chunks may be deleted without it: {error}"
        return
    chunks, size = freed(consumers, name, survey.census.retired, survey.census.chunks), survey.disk.chunk_size
    much = output.count(len(chunks), "chunk") + ("" if size is None else f", about {output.size(len(chunks) * size)}")
    text = "without it, no further chunk may be deleted"
    if chunks:
        what = output.chunk_range(chunks.start, chunks.stop)
        text = f"without it, {what} may be deleted ({much}): no other consumer keeps them"
    yield text
