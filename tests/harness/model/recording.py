"""Records which calls of a process change files, as steps of the model; what does so in another way is "unseen"."""

import contextlib
import json
import os
import re
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from lazyshard.format import records
from lazyshard.format.records import End, Head, Manifest, Owner, Retired
from lazyshard.format.row import parse_row
from lazyshard.format.seal import Seal
from lazyshard.format.state import Cursor
from tests.harness.model.disk import FOLDER, SHORT, Content, Step, is_junk
from tests.harness.model.producer import Plan

PER_CHUNK: Final = 2  # Rows of a full chunk; one that is not holds one less
_TOKEN: Final = re.compile(r"\.([0-9a-f]{16}|[a-h])$")
_WORKPLACE: Final = re.compile(rf"/{re.escape(records.TEMPORARY)}/[0-9]+\.([0-9a-f]{{16}}|[a-h])(?=[./]|$)")
_CHANGES: Final = (
    *("os.rename", "os.link", "os.remove", "os.rmdir", "os.mkdir", "os.truncate", "os.symlink", "shutil.move"),
)
_WRITING: Final = os.O_WRONLY | os.O_RDWR


class Recorder:
    """Writes down what this process does, a JSON line a call, and kills it after so many `calls`, if any; nothing is
    put back. `root`: the directory that holds the stream's."""

    def __init__(self, root: Path, record: Path, calls: int = 0) -> None:
        self._root = os.fspath(root)
        self._record = os.open(record, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self._raw_write = os.write
        self._calls = calls
        self._inside = False

    def install(self) -> None:
        counted = ("open", "write", "fsync", "fdatasync", "replace", "rename", "link", "unlink", "remove", "rmdir")
        for name in (*counted, "mkdir"):
            setattr(os, name, self._wrap(name, getattr(os, name)))
        sys.addaudithook(self._audit)

    def _wrap(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*arguments: Any, **named: Any) -> Any:
            before = self._inside
            self._inside = True
            try:
                paths = self._paths(name, arguments, named)
                result = call(*arguments, **named)
                step = self._step(name, paths, arguments, result)
            finally:
                self._inside = before
            if step is not None:
                self._tell(step)
            return result

        return wrapped

    def _paths(self, name: str, arguments: tuple[Any, ...], named: dict[str, Any]) -> list[str | None]:
        if name in ("write", "fsync", "fdatasync"):
            return [self._below(os.readlink(f"/proc/self/fd/{arguments[0]}"))]
        folder = named.get("dir_fd")
        given = arguments[: 2 if name in ("replace", "rename", "link") else 1]
        start = "" if folder is None else os.readlink(f"/proc/self/fd/{folder}")
        return [self._below(os.path.abspath(os.path.join(start, os.fsdecode(one)))) for one in given]

    def _below(self, path: str) -> str | None:
        if path == self._root:
            return ""
        if not path.startswith(f"{self._root}/"):
            return None
        path = path.removeprefix(f"{self._root}/")
        name = path.rpartition("/")[2]
        return None if _means_nothing(name) else path

    def _step(self, name: str, paths: list[str | None], arguments: tuple[Any, ...], result: Any) -> list[Any] | None:
        path = paths[0]
        if path is None:
            return None
        if name == "open":
            flags = arguments[1]
            if flags & os.O_CREAT and flags & os.O_EXCL:
                return ["create", path]
            return ["unseen", "open", path] if flags & _WRITING else None
        if name == "write":
            return ["write", path, bytes(arguments[1])[:result].decode("latin-1")]
        if name in ("fsync", "fdatasync"):
            return ["sync_directory" if os.path.isdir(os.path.join(self._root, path)) else "sync", path]
        words = {"replace": "rename", "unlink": "remove"}
        return [words.get(name, name), *paths]

    def _tell(self, step: list[Any]) -> None:
        self._raw_write(self._record, json.dumps(step).encode() + b"\n")
        self._calls -= 1
        if self._calls == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    def _audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self._inside or (event not in _CHANGES and event != "open"):
            return
        if event == "open" and not (isinstance(arguments[2], int) and arguments[2] & _WRITING):
            return
        with contextlib.suppress(TypeError, ValueError):
            path = self._below(os.path.abspath(os.fsdecode(arguments[0])))
            if path is not None:
                self._tell(["unseen", event, path])


def read_record(record: Path, told: Plan | Callable[[str, bytes], Content]) -> list[Step]:
    """Returns the steps; `told` says what a file with these bytes holds, a plan by `content`."""
    steps = []
    for line in record.read_text().splitlines():
        kind, *given = json.loads(line)
        if kind == "write":
            data = given[1].encode("latin-1")
            value = content(given[0], data, told) if isinstance(told, Plan) else told(given[0], data)
            steps.append((kind, starred(given[0]), value))
        else:
            steps.append((kind, *map(starred, given)))
    return steps


def read_disk(root: Path, plan: Plan) -> dict[str, Content]:
    found: dict[str, Content] = {}
    for path in sorted(root.rglob("*")):
        if not _means_nothing(path.name):
            name = os.fspath(path.relative_to(root))
            value = FOLDER if path.is_dir() else content(name, path.read_bytes(), plan)
            found[starred(name)] = value
    return found


def _means_nothing(name: str) -> bool:
    lock = name == records.LOCK or (name.startswith(".") and name.endswith(".lock"))
    return lock or _TOKEN.sub("", name) == records.HEAD_RESERVE


def content(path: str, data: bytes, plan: Plan) -> Content:
    name = _TOKEN.sub("", path.rpartition("/")[2])
    if not data:
        return SHORT
    if name.endswith(records.SEAL_SUFFIX):
        seal = Seal.decode(data, chunk := _chunk(name))
        assert seal.source is not None
        return ("seal", chunk, -(-seal.source // PER_CHUNK), seal.samples == PER_CHUNK)
    if records.parse_chunk_name(name) is not None:
        rows = [parse_row(line)["id"] for line in data.splitlines(keepends=True)]
        piece = rows[0] // PER_CHUNK
        stop = PER_CHUNK * (piece + 1) - (plan.partial and piece + 1 == plan.chunks)
        assert rows == list(range(PER_CHUNK * piece, stop)), rows
        return ("rows", piece)
    if name == records.HEAD:
        head = Head.decode(data)
        return ("head", head.chunks, head.ended)
    if name == records.END:
        return ("end", End.decode(data).chunks)
    if name == records.RETIRED:
        return ("retired", Retired.decode(data).chunks_before)
    if name == records.MANIFEST:
        assert Manifest.decode(data).samples_per_chunk == PER_CHUNK
        return ("manifest",)
    if name == records.OWNER:
        assert Owner.decode(data).epoch > 0
        return ("owner",)
    return ("cursor", Cursor.decode(data, "run").chunks_before)


def _chunk(name: str) -> int:
    parsed = records.parse_chunk_name(name)
    assert parsed is not None, name
    return parsed[0]


def starred(path: str) -> str:
    return _TOKEN.sub(".*", _WORKPLACE.sub(f"/{records.TEMPORARY}/*", path)) if is_junk(path) else path
