"""Troubles with the files of a stream and where they lie: damage, permissions, shares and stores."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Final
from unittest import mock

from lazyshard import ChunkWriter, StreamReader
from lazyshard.cli.main import main as lazyshard
from lazyshard.store.objects import PATIENCE_VARIABLE
from lazyshard.stream.retire import retire
from lazyshard.stream.watchdog import READERS, Watchdog
from tests.packaging.trouble_words import STREAM, each_of, line, rows_of_stream, said, told, without_rights
from tests.stream.streams import produce


def torn(name: str, data: bytes = b"") -> int:
    """Makes a stream with a file that holds something else; returns its size."""
    return (produce(STREAM, 4) / name).write_bytes(data)


def mistake() -> None:
    STREAM.mkdir()
    (STREAM / "chunk_00000.jsonl").write_bytes(b'{"id":0}\n')
    (STREAM / "chunk_00000.jsonl.completed").touch()
    StreamReader(STREAM)


def end_torn() -> None:
    torn("stream.end")
    (STREAM / "head.json").unlink()
    rows_of_stream()


def head_torn() -> str:
    torn("head.json")
    printed = said(lazyshard, 0, "status", "stream").splitlines()
    at = printed.index(next(one for one in printed if one.startswith("problem")))
    return "\n".join(printed[at:])


def verified(name: str, data: bytes, begin: str, code: int) -> str:
    produce(STREAM, 4)
    (STREAM / "cursors").mkdir(exist_ok=True)
    (STREAM / name).write_bytes(data)
    return line(said(lazyshard, code, "verify", "stream"), begin)


def retired_torn() -> None:
    torn("retired.json")
    (STREAM / "chunk_00000.jsonl").unlink()
    (STREAM / "chunk_00000.jsonl.completed").unlink()
    rows_of_stream()


def later_version() -> None:
    produce(STREAM, 4)
    manifest = json.loads((STREAM / "stream.json").read_bytes())
    (STREAM / "stream.json").write_text(json.dumps(manifest | {"format": 9}))
    StreamReader(STREAM)


def changed() -> None:
    produce(STREAM, 4)
    chunk = STREAM / "chunk_00001.jsonl"
    chunk.write_bytes(chunk.read_bytes().replace(b"3", b"4"))
    rows_of_stream()


def chunk_gone() -> None:
    produce(STREAM, 4)
    (STREAM / "chunk_00001.jsonl").unlink()
    rows_of_stream()


def deleted() -> None:
    retire(produce(STREAM, 6), 2, 3)
    rows_of_stream()


def no_plain_file() -> None:
    produce(STREAM, 4)
    (STREAM / "chunk_00001.jsonl").unlink()
    (STREAM / "chunk_00001.jsonl").mkdir()
    rows_of_stream()


def unreadable() -> None:
    produce(STREAM, 4)
    for path, mode in ((Path(), 0o755), (STREAM, 0o755), (STREAM / "chunk_00001.jsonl", 0)):
        path.chmod(mode)
    with without_rights():
        rows_of_stream()


def empty() -> str:
    STREAM.mkdir()
    return f"{said(lazyshard, 5, 'verify', 'stream')}\n{told(lambda: StreamReader('AI-MO/NuminaMath-1.5'))}"


def unsealed() -> None:
    STREAM.mkdir()
    (STREAM / "chunk_00000.jsonl").write_bytes(b'{"id":0}\n')
    StreamReader(STREAM, samples_per_chunk=2)


def manifest_gone() -> None:
    produce(STREAM, 4)
    (STREAM / "stream.json").unlink()
    StreamReader(STREAM)


def no_answer() -> str:
    lines: list[str] = []
    now = [0.0]
    watchdog = Watchdog(lines.append, clock=lambda: now[0], again=True, advice=READERS._advice)
    watchdog.ask(lambda: "reading stream/head.json")
    now[0] = 61.0
    watchdog.look()
    now[0] = 75.0
    watchdog.answered()
    return "\n".join(lines)


def store_away() -> None:
    away = {
        **{"AWS_ACCESS_KEY_ID": "for-tests", "AWS_SECRET_ACCESS_KEY": "for-tests", PATIENCE_VARIABLE: "0"},
        **{"AWS_ENDPOINT_URL": "http://127.0.0.1:9", "AWS_EC2_METADATA_DISABLED": "true"},
        **{"AWS_CONFIG_FILE": "/dev/null", "AWS_SHARED_CREDENTIALS_FILE": "/dev/null"},
        **{"AWS_DEFAULT_REGION": "us-east-1"},
    }
    with mock.patch.dict(os.environ, away):
        StreamReader("s3://bucket/stream")


FILES: Final[dict[str, Callable[[], object]]] = {
    "manifest": lambda: (torn("stream.json"), StreamReader(STREAM)),
    "head": head_torn,
    "end": end_torn,
    "owner": lambda: verified("stream.owner", b"", "leftover: stream.owner", 0),
    "cursor": lambda: verified("cursors/sft.json", b"{}", "damage: cursors/sft.json", 5),
    "hint": lambda: verified("cursors/sft.reading.json", b"{}", "leftover: cursors/sft.reading.json", 0),
    "retired": retired_torn,
}
"""By file."""

TROUBLES: Final[dict[str, Callable[[], object]]] = {
    "Mistakes in a call": mistake,
    "FileInvalid": lambda: each_of(FILES),
    "SealInvalid": lambda: (torn("chunk_00001.jsonl.completed"), rows_of_stream()),
    "ChunkCorrupt": changed,
    "ChunkMissing": chunk_gone,
    "ChunkRetired": deleted,
    "StreamMissing": empty,
    "StreamUnsealed": unsealed,
    "StreamInvalid": manifest_gone,
    "StreamMismatch": lambda: ChunkWriter(produce(STREAM, 4, end=False), 3),
    "No answer from a share": no_answer,
}
"""By heading of the page."""

GROUPS: Final[dict[str, dict[str, Callable[[], object]]]] = {
    "Files that cannot be read": {
        "VersionUnsupported": later_version,
        "FileRefused": no_plain_file,
        "FileUnreadable": unreadable,
    },
    "Object stores": {
        "StoreRefused": lambda: StreamReader("nosuch://bucket/stream"),
        "StoreUnavailable": store_away,
    },
}
"""By heading and class, for each heading with a table of classes."""
