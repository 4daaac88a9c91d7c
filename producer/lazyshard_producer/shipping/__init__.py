"""Publishing to an object store: a run publishes into a directory of this machine, and a thread puts that to the store.

Here a directory is told from an object store; docs/object-storage-producer.md has the order of steps.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from lazyshard.store.urls import is_url
from lazyshard_producer.configuration.settings import Settings
from lazyshard_producer.holding import Gate, Holdback, Shelf
from lazyshard_producer.stop import Stop


class Destination:
    """A directory in which a run publishes, and its shelf, where the chunks lie in the end."""

    def __init__(self, directory: str) -> None:
        self.directory = directory
        self.shelf = Shelf(Path(directory))

    def begin(self, published_chunks: int) -> None:
        """The run's writer is open, with so many chunks."""

    def check(self) -> None:
        """Is called now and then; raises what has gone wrong behind the run's back."""

    def gate(self, holdback: Holdback | None) -> Gate | None:
        """Returns what is to be asked before each chunk and told after it; `holdback` is what the limits ask for."""
        return holdback

    def settle(self, published_chunks: int, tell: Callable[[str | None], None]) -> bool:
        """Returns when all is where it belongs, the writer being closed with so many chunks; False if it is not yet.

        `tell` is told now and then what is waited for; None for nothing out of the ordinary.
        """
        return True


@contextlib.contextmanager
def open_destination(
    settings: Settings, *, warn: Callable[[str], None], stop: Stop, prepare: Callable[[], None]
) -> Iterator[Destination]:
    """Yields the destination for `settings.out`, and lets go of all that it holds.

    `prepare` is called before another producer is fenced, unless the stream has ended: raises where the run cannot be.
    """
    if not is_url(settings.out):
        yield Destination(settings.out)
        return
    # Only here: a run into a directory needs none of it.
    from lazyshard_producer.shipping.objects import open_objects

    with open_objects(settings, warn=warn, stop=stop, prepare=prepare) as destination:
        yield destination


@contextlib.contextmanager
def as_directory(place: str, samples_per_chunk: int | None) -> Iterator[str]:
    """Yields a directory that tells how far a stream is: its own, or a copy of what is newest in an object store.

    Where no stream is there yet, it does not exist. `samples_per_chunk` None takes what the manifest says.
    """
    if not is_url(place):
        yield place
        return
    from lazyshard_producer.shipping.objects import copy_newest

    with tempfile.TemporaryDirectory(prefix="lazyshard-") as folder:
        copy = Path(folder, "stream")
        copy_newest(place, samples_per_chunk, copy)
        yield str(copy)
