"""Troubles of those who make a stream or work on one: settings, sources, writers, measures."""

from __future__ import annotations

import contextlib
import errno
import math
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final
from unittest import mock

from lazyshard import ChunkWriter, LazyShardError
from lazyshard.cli.main import main as lazyshard
from lazyshard.conversion.indexed import IndexedReader
from lazyshard.format.records import Owner
from lazyshard_producer.cli import main as producer
from lazyshard_producer.configuration.quantities import Amount
from lazyshard_producer.configuration.settings import Limits
from lazyshard_producer.holding.limits import ByteLimit, Claim, Situation, ahead_reason, room_reason, why_kept
from lazyshard_producer.holding.shelf import Stock
from lazyshard_producer.rows.recipe import Recipe, Workers
from tests.packaging.trouble_words import STREAM, said, told
from tests.stream.streams import produce


def bad_row() -> str:
    Path("a.jsonl").write_text('{"id":0}\n{"id":1 "text":2}\n')
    line_of_file = said(producer, 3, *RUN)

    def nan() -> None:
        with ChunkWriter(STREAM, 2) as writer:
            writer.write({"loss": math.nan})

    return f"{line_of_file}\n{told(nan)}"


SFT: Final = Claim(name="sft", done=4, needs=5, committed_at=880.0, seen_at=990.0)


def held(limits: Limits, *claims: Claim) -> Situation:
    return Situation(out="stream", claims=claims, limits=limits, published=64, samples=64_000, held_s=10.0, now=1000.0)


def holds() -> str:
    far = ahead_reason(held(Limits(max_ahead=Amount(number=64, unit="chunks"))))
    near = ahead_reason(held(Limits(max_ahead=Amount(number=59, unit="chunks")), SFT))
    stock, room = Stock(first=0, stop=64, size=6_400_000, largest=100_000), ByteLimit(limit=6_400_000, chunk=100_000)

    def full(limits: Limits, *claims: Claim) -> str:
        kept = why_kept(claims, limits, 64)
        return room_reason(held(limits, *claims), kept, stock, room, deadlock=False, trouble=None)

    done = Claim(name="sft", done=64, needs=60, committed_at=880.0, seen_at=990.0)
    return "\n".join(
        (
            far,
            near,
            full(Limits(retain="all")),
            full(Limits(retain=64), done),
            full(Limits(retain="consumed")),
            full(Limits(retain="consumed", consumers=("dpo",)), SFT),
            full(Limits(retain="consumed"), SFT),
        )
    )


RUN: Final = ("run", "--source", "a.jsonl", "--out", "stream", "--samples-per-chunk", "2", "--no-progress")


def bad_settings() -> str:
    given = ("run", "--source", "a.jsonl", "--out", "stream")
    return said(producer, 2, *given, "--samples-per-chunk", "0", "--rate", "fast")


def bad_setting() -> str:
    Path("a.jsonl").write_text('{"id":0}\n')
    return said(producer, 2, *RUN, "--transform", "my_rows:clean")


def no_package() -> str:
    Path("a.parquet").write_bytes(b"")
    given = [part.replace("jsonl", "parquet") for part in RUN]
    with mock.patch.dict(sys.modules, {"pyarrow": None}):
        return said(producer, 1, *given)


def bad_index() -> None:
    Path("corpus.idx").write_bytes(b"hello")
    Path("corpus.bin").write_bytes(b"")
    IndexedReader("corpus.idx")


def exported() -> str:
    with ChunkWriter(STREAM, 2) as writer:
        writer.write({"input_ids": [1, 2]})
    Path("corpus.idx").write_bytes(b"")
    return said(lazyshard, 3, "export", "stream", "corpus")


def worker_dies() -> None:
    workers = Workers(Recipe(transform="tests.producer.recipes:dies"), 1)
    try:
        work = workers.submit([b"{}"], 0)
        while workers.result(work, 1.0) is None:
            pass
    finally:
        workers.close()


def ended() -> None:
    ChunkWriter(produce(STREAM, 4), 2)


def two_producers() -> None:
    with ChunkWriter(STREAM, 2):
        ChunkWriter(STREAM, 2)


def fenced() -> str:
    def publish(prepare: Callable[[], object]) -> None:
        writer = ChunkWriter(STREAM, 2)
        writer.write({"id": 0})
        prepare()
        try:
            writer.write({"id": 1})
        finally:
            with contextlib.suppress(LazyShardError):
                writer.close(end=False)

    owner = Owner(epoch=9, token="0" * 16, host="node2", pid=4711, since=0.0)
    other = told(lambda: publish(lambda: (STREAM / "stream.owner").write_bytes(owner.encode())))
    return f"{other}\n{told(lambda: publish((STREAM / 'stream.owner').unlink))}"


def disk_full() -> None:
    writer = ChunkWriter(STREAM, 2)
    writer.write({"id": 0})
    writer.write({"id": 1})
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    with mock.patch("os.fsync", side_effect=full), mock.patch("os.fdatasync", side_effect=full):
        writer.write({"id": 2})
        writer.write({"id": 3})
        writer.close()


TROUBLES: Final[dict[str, Callable[[], object]]] = {
    "RowInvalid": bad_row,
    "What the producer waits for": holds,
    "ProducerFenced": fenced,
}
"""By heading of the page."""

GROUPS: Final[dict[str, dict[str, Callable[[], object]]]] = {
    "Options and sources": {
        "SettingInvalid": bad_setting,
        "SettingsInvalid": bad_settings,
        "ExtraMissing": no_package,
        "SourceRefused": lambda: said(producer, 4, *RUN),
        "IndexedInvalid": bad_index,
        "ExportExists": exported,
        "WorkerFailed": worker_dies,
    },
    "Writing a stream": {
        "StreamEnded": ended,
        "ProducerLocked": two_producers,
        "WriterFailed": disk_full,
    },
}
"""By heading and class, for each heading with a table of classes."""
