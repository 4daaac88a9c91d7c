"""What a trouble says, and what those of `docs/troubleshooting.md` share: a tiny stream in an empty directory."""

from __future__ import annotations

import contextlib
import io
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from lazyshard import LazyShardedDataset, LazyShardError, StreamReader
from tests.data.options import grouped

STREAM: Final = Path("stream")
NOBODY: Final = 65534

Row = dict[str, Any]


def told(trouble: Callable[[], object]) -> str:
    """Returns what a trouble says: the last line of its traceback, or what it returns."""
    try:
        found = trouble()
    except (LazyShardError, ValueError) as error:
        kind = type(error)
        module = "" if kind.__module__ == "builtins" else f"{kind.__module__}."
        return f"{module}{kind.__qualname__}: {error}"
    assert isinstance(found, str), "nothing was raised"
    return found


def each_of(troubles: Mapping[str, Callable[[], object]]) -> str:
    """Returns what all of these say, each in a folder of its own."""
    here, lines = Path.cwd(), []
    for name, trouble in troubles.items():
        Path(name).mkdir()
        os.chdir(name)
        try:
            lines.append(told(trouble))
        finally:
            os.chdir(here)
    return "\n".join(lines)


def said(command: Callable[[list[str]], int], code: int, *arguments: str) -> str:
    """Runs a command in this process; returns what it printed."""
    with contextlib.redirect_stderr(io.StringIO()) as printed, contextlib.redirect_stdout(printed):
        assert command([*arguments]) == code, printed.getvalue()
    return printed.getvalue().rstrip("\n")


def line(printed: str, begin: str) -> str:
    """Returns the line that begins so."""
    (found,) = (one for one in printed.splitlines() if one.startswith(begin))
    return found


@contextlib.contextmanager
def logged() -> Iterator[list[str]]:
    """Collects what is logged."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger("lazyshard")
    log.addHandler(handler)
    try:
        yield lines
    finally:
        log.removeHandler(handler)


def dataset(encode: Callable[[Row], Row] | None = None, **options: Any) -> LazyShardedDataset:
    return LazyShardedDataset(STREAM, encode, **grouped({"dp_rank": 0, "dp_size": 1, "max_wait": 0} | options))


def rows_of_stream() -> list[Row]:
    return list(StreamReader(STREAM, max_wait=0))


@contextlib.contextmanager
def without_rights() -> Iterator[None]:
    """Does what is in the block as a user who owns nothing here."""
    root = os.geteuid() == 0
    try:
        if root:
            os.seteuid(NOBODY)
        yield
    finally:
        if root:
            os.seteuid(0)
