"""What the properties are tried on: small streams and courses of every shape, the same ones in every run."""

import warnings
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st

from lazyshard.part import Part
from lazyshard.plan.course import Course
from lazyshard.plan.deal import Deal, Rules
from tests.plan import oracle


def megatron() -> Any:
    """Megatron Core's own helpers, compiled."""
    with warnings.catch_warnings():
        # Of Transformer Engine, which is not there.
        warnings.simplefilter("ignore")
        return pytest.importorskip("megatron.core.datasets.helpers", exc_type=ImportError)


PROPERTY = settings(deadline=None, database=None, derandomize=True, max_examples=200)


@dataclass(frozen=True)
class Case:
    rules: Rules
    part: Part
    total: int

    @property
    def deal(self) -> Deal:
        return Deal(self.part.dp, self.rules.unit)

    def course(self, epoch: int = 0) -> Course:
        return Course(self.rules, [Part(self.part.dp, self.part.batch_size, epoch=epoch)])

    def lanes(self) -> list[list[int]]:
        return oracle.dealt(self.part.dp, self.rules.unit, 0, self.total)

    def shuffled(self, epoch: int) -> list[list[int]]:
        window, seed = self.rules.window, self.rules.seed
        return [oracle.shuffled(lane, window, seed, epoch, number) for number, lane in enumerate(self.lanes())]

    def drawn(self, epoch: int) -> list[list[int]]:
        """Return what each lane draws in `epoch`, by the oracle: as many batches as all can, in lockstep."""
        return oracle.ended(self.shuffled(epoch), self.part.batch_size, "drop")


@st.composite
def cases(draw: st.DrawFn, filled: bool = False) -> Case:
    """Any run of up to 5 lanes over up to 90 samples; if `filled`, behind those of one batch of every lane."""
    unit = draw(st.integers(1, 6))
    rules = Rules(unit, unit * draw(st.integers(0, 4)), draw(st.integers(0, 3)))
    part = Part(draw(st.integers(1, 5)), draw(st.integers(1, 5)))
    return Case(rules, part, draw(st.integers(0, 90)) + (part.dp * part.batch_size if filled else 0))
