"""A scene that is ready to be played, and what its stream is when nothing happens to it."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tests.harness.points.reader import Reader
from tests.harness.points.scenes import Scene
from tests.harness.points.sealed import Violation
from tests.harness.processes.commands import Commands
from tests.harness.scenes.arrays import side_bytes
from tests.harness.scenes.rows import is_refused, made, tokens_of
from tests.harness.scenes.sources import FedSource
from tests.harness.scenes.streams import Stream

__all__ = ["HANGS_S", "Stage", "Whole"]

HANGS_S: Final = 30.0
"""A run that has not ended by then never will."""


@dataclass(frozen=True, slots=True)
class Whole:
    """What comes of a scene in one run.

    Attributes:
        lines: its rows, in order.
        seals: its seals, but for their times.
        refused: its refused rows, but for their times.
        calls: how many calls that change a file it takes.
        arrays: the bytes of each row's arrays, in order; None where rows hold none.
    """

    lines: list[str]
    seals: list[dict[str, Any]]
    refused: list[dict[str, Any]]
    calls: int
    arrays: list[bytes] | None = None


class Stage:
    """A scene with its sources, and who plays it.

    Args:
        scene: the scene.
        nursery: runs the command.
        reader: reads what it publishes.
        folder: is made, for all that is written.
        broken: further functions that the command calls first.

    Raises:
        Violation: the scene does not come out right even when nothing happens.
    """

    def __init__(
        self, scene: Scene, nursery: Commands, reader: Reader, folder: Path, broken: Sequence[str] = ()
    ) -> None:
        self.scene = scene
        self.nursery = nursery
        self.reader = reader
        self.prepare: Final = (*scene.prepare, *broken)
        self._folder = folder
        self._numbers = itertools.count()
        folder.mkdir()
        self._shared = None if scene.live else scene.make(folder)
        self.whole: Final = self._play_whole()

    def new_folder(self) -> tuple[Path, list[FedSource]]:
        """Returns a folder for a stream, and its sources."""
        folder = self._folder / f"{next(self._numbers)}"
        folder.mkdir()
        return folder, self.scene.make(folder) if self._shared is None else self._shared

    def _play_whole(self) -> Whole:
        folder, sources = self.new_folder()
        options = list(self.scene.options)
        if "--retain" in options:
            # The same rows, and nobody has to be waited for.
            del options[options.index("--retain") :]
        stream = Stream(self.nursery, folder / "out", sources, options, self.scene.per_chunk)
        status, said = stream.run(kill_at=0, most_s=HANGS_S, prepare=self.prepare)
        if status:
            raise Violation(f"not even a run to which nothing happens gets through: {status}: {said}")
        whole = Whole(
            [line.decode() for line in stream.lines()],
            stream.seals(),
            stream.refused(),
            self.nursery.counted.calls,
            [side_bytes(number) for number, _ in stream.rows()] if self.scene.encoded else None,
        )
        makes, encodes = "--transform" in options, self.scene.encoded
        rows = [row for source in sources for row in source.rows]
        expected, found = made(rows, transform=makes, where=makes, encode=encodes), stream.rows()
        if self.scene.tokens:
            expected = [one for one in expected for _ in range(tokens_of(one[0]))]
        plain = self.scene.ordered and not makes
        if (found if plain else sorted(map(str, found))) != (expected if plain else sorted(map(str, expected))):
            raise Violation(f"a run to which nothing happens gives {found}, expected {expected}")
        refused = sum(is_refused(row, transform=encodes) for row in rows)
        if len(whole.refused) < refused or (not makes and len(whole.refused) > refused):
            raise Violation(f"a run to which nothing happens refuses {whole.refused}, expected {refused} rows")
        beside = b"".join(path.read_bytes() for path in sorted(stream.out.glob("chunk_*.arrays")))
        if beside != b"".join(whole.arrays or []):
            raise Violation(f"a run to which nothing happens makes arrays of {beside!r}, expected {whole.arrays}")
        return whole
