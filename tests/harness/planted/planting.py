"""Ways to plant a mistake into this process: in a function's place, in a file that was begun, in a resumed run."""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lazyshard.store import durable
from lazyshard.stream import lock
from lazyshard.stream.lock import WriterLock


def everywhere(original: Any, broken: Any) -> None:
    """Puts something else in a function's place, wherever it was imported."""
    for name, module in list(sys.modules.items()):
        if name.startswith("lazyshard"):
            for key, value in list(vars(module).items()):
                if value is original:
                    setattr(module, key, broken)


def around(owner: Any, name: str, instead: Callable[..., Any]) -> None:
    """Calls something in place of a method or a function; it is given the original first."""
    original = getattr(owner, name)
    setattr(owner, name, lambda *arguments, **named: instead(original, *arguments, **named))


def keep_begun(suffix: str) -> None:  # Has files of names with this end outlive a kill, and the next run add to them
    around(
        WriterLock,
        "path",
        lambda path, self, name: (
            self.place.parent.with_name(f"{name}.part") if name.endswith(suffix) else path(self, name)
        ),
    )
    everywhere(durable.create, lambda path: os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644))


def on_restart(change: Callable[[Path, int], object]) -> None:
    """Makes a change in runs alone that find something published: of its directory and the number of its last chunk."""
    original = lock.recover

    def recover(directory: Path, *given: Any) -> Any:
        found, last = original(directory, *given)
        if last is not None:
            change(directory, last.chunk)
        return found, last

    everywhere(original, recover)
