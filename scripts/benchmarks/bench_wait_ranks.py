"""Starts ranks as processes, perhaps under strace, and reads what they print."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

PROCESS: Final = Path(__file__).with_name("bench_wait_process.py")


class Rank:
    """A process of `bench_wait_process.py`.

    Args:
        what: what it does.
        settings: for that.
        before: a command that starts it.
    """

    def __init__(self, what: str, settings: dict[str, Any], before: Sequence[str] = ()) -> None:
        self._what = what
        self._process = subprocess.Popen(
            [*before, sys.executable, str(PROCESS), what, json.dumps(settings)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def line(self) -> dict[str, Any]:
        """Returns the next line that it prints.

        Raises:
            SystemExit: it ended instead.
        """
        assert self._process.stdout is not None and self._process.stderr is not None
        if line := self._process.stdout.readline():
            found: dict[str, Any] = json.loads(line)
            return found
        raise SystemExit(f"{self._what}: a rank has failed\n{self._process.stderr.read()}")

    def close(self) -> None:
        """Ends it, if it has not ended yet."""
        self._process.terminate()
        self._process.communicate()


@contextlib.contextmanager
def close_all(ranks: Iterable[Rank]) -> Iterator[None]:
    """Ends the processes, however it is left."""
    try:
        yield
    finally:
        for rank in ranks:
            rank.close()
