"""Follows a directory by hand: a reader whose clock is set, and which can be killed at any moment."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from lazyshard_producer.configuration.settings import SourceSettings
from lazyshard_producer.following.directory import FollowedDirectory
from lazyshard_producer.following.journal import FollowPosition
from lazyshard_producer.sources.source import Context, Line, RowOrigin


class Follower:
    """Reads a directory, publishes some of what it has read, and continues from there in a new object.

    Attributes:
        published: rows that a seal holds, of all lives; `read`: those that this life has read behind them.
        bound: rows behind them that were read when that seal was made: what was made of them may be published.
        due: those of them that this life must read first.
    """

    def __init__(self, directory: Path, out: Path | None = None, **settings: Any) -> None:
        self.directory = directory
        self.settings = SourceSettings(path=str(directory), follow=True, **settings)
        self.context = Context(out or directory.parent, 100_000)
        self.now = 1000.0
        self.published: list[Line] = []
        self.places: list[RowOrigin] = []
        self.position: dict[str, Any] | None = None
        self.bound: list[Line] = []
        self.open()

    def open(self) -> None:
        self.source = FollowedDirectory(self.settings, self.position, self.context, clock=lambda: self.now)
        self.due = list(self.bound)
        self.mark = self.source.start
        self.read: list[Line] = []
        self.marks: list[FollowPosition] = []
        self.ended = False

    def step(self) -> bool:
        rows = self.source.read()
        if rows is None:
            self.ended = True
            return False
        self.read += rows.lines
        assert self.read[: len(self.due)] == self.due[: len(self.read)]
        self.marks += [rows.position(index) for index in range(len(rows.lines))]
        self.places += [rows.place(index) for index in range(len(rows.lines))]
        return bool(rows.lines)

    def take(self, seconds: float = 3.0) -> list[Line]:
        """Lets so much time pass and reads what is there; returns it."""
        before = len(self.read)
        self.now += seconds
        nothing = 0
        while nothing < 3 and not self.ended:
            nothing = 0 if self.step() else nothing + 1
        return self.read[before:]

    def publish(self, count: int | None = None) -> None:
        """Puts so many of the rows that were read into a seal, all by default."""
        count = len(self.read) if count is None else min(count, len(self.read))
        if count:
            self.mark = self.marks[count - 1]
        self.position = self.source.entry(self.mark)
        self.published += self.read[:count]
        self.read, self.marks = self.read[count:], self.marks[count:]
        self.due, self.bound = self.due[count:], list(self.read)

    @property
    def entry(self) -> dict[str, Any]:
        assert self.position is not None
        return self.position

    @property
    def journal(self) -> Path:
        name: str = self.entry["journal"]
        assert name
        return self.context.out / ".producer.sources" / name

    def kill(self) -> None:
        """Loses all that is not published, and begins a new life."""
        self.close()
        self.open()

    def close(self) -> None:
        self.source.close()


Follow = Callable[..., Follower]


def append(path: Path, data: bytes) -> None:
    with path.open("ab") as file:
        file.write(data)
