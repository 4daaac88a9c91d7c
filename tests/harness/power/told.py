"""What a reader or a consumer was told, and what has to be so from then on, whatever becomes of the machine."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Told:
    """What somebody was told.

    Attributes:
        chunks: published, by head.json.
        samples: in them.
        ended: whether the stream has ended.
        finished: whether the command that ended it has returned: nobody starts it again.
        committed: chunks that a consumer has acknowledged, and was told that its cursor says so durably.
        met: name of the call at which that was.
    """

    chunks: int = 0
    samples: int = 0
    ended: bool = False
    committed: int = 0
    finished: bool = False
    met: str = field(default="", compare=False)

    @staticmethod
    def look(out: Path, committed: int = 0, met: str = "") -> Told:
        """Reads the head as a reader does."""
        try:
            head = json.loads((out / "head.json").read_bytes())
        except (OSError, ValueError):
            return Told(committed=committed, met=met)
        return Told(head["chunks"], head["samples"], head["ended"], committed, met=met)

    def and_later(self, later: Told) -> Told:
        """Returns what was told by then: what was once told stays so."""
        return Told(
            max(self.chunks, later.chunks),
            max(self.samples, later.samples),
            self.ended or later.ended,
            max(self.committed, later.committed),
            self.finished or later.finished,
            later.met,
        )

    def write(self, path: Path) -> None:
        """Writes it down; no call of this counts as one that changes a file."""
        path.write_text(json.dumps(asdict(self)))

    @staticmethod
    def read(path: Path) -> Told:
        """Reads what was written down."""
        return Told(**json.loads(path.read_text()))
