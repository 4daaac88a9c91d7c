"""The log of a training process for the demo: one JSON line per step, and a last one when it has finished.

The process appends, `demo.py` follows, and the final report uses nothing else. Times are seconds of `time.monotonic()`,
which all processes of a machine share.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple


class Step(NamedTuple):
    """One step of one rank.

    Attributes:
        ids: of the samples trained.
        loss: mean over all ranks.
        waited_s: how long the rank was blocked until it had its batch.
        at: when the step was done.
        published: samples in the stream by then.
    """

    ids: list[int]
    loss: float
    waited_s: float
    at: float
    published: int


class Finish(NamedTuple):
    """The last line of a rank.

    Attributes:
        leftover: samples of the stream that it finds left over, over all ranks.
        at: when it reached the end of the stream.
    """

    leftover: int | None
    at: float


def step_line(step: Step) -> str:
    """Returns the line of a step."""
    return json.dumps(step._asdict()) + "\n"


def finish_line(finish: Finish) -> str:
    """Returns the last line."""
    return json.dumps({"finish": finish._asdict()}) + "\n"


class StepFile:
    """Follows a rank's record while it grows.

    Attributes:
        steps: those read so far.
        finish: None as long as the rank has not finished.
    """

    def __init__(self, path: Path) -> None:
        self.steps: list[Step] = []
        self.finish: Finish | None = None
        self._path = path
        self._offset = 0

    def follow(self) -> None:
        """Reads new complete lines."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                new = file.read()
        except FileNotFoundError:
            return
        complete = new[: new.rfind(b"\n") + 1]
        self._offset += len(complete)
        for line in complete.splitlines():
            values = json.loads(line)
            if "finish" in values:
                self.finish = Finish(**values["finish"])
            else:
                self.steps.append(Step(**values))

    @property
    def samples(self) -> int:
        """Samples trained so far."""
        return sum(len(step.ids) for step in self.steps)
