"""What the properties are tried on: small streams and plans of every shape.

Small numbers meet every border (empty tail, only tail, a window cut short, a batch across stripes) sooner than large
ones. The choice is the same in every run, so that a test fails because of a change and not by chance.
"""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import settings
from hypothesis import strategies as st

from lazyshard.plan.deal import Deal
from lazyshard.plan.lane import Plan
from tests.plan import oracle

PROPERTY = settings(deadline=None, database=None, derandomize=True, max_examples=200)


@dataclass(frozen=True)
class Case:
    """A plan and the end of its stream."""

    plan: Plan
    total: int

    def lanes(self) -> list[list[int]]:
        """Return the samples of each lane, as the oracle deals them."""
        deal = self.plan.deal
        return oracle.dealt(deal.dp, deal.unit, deal.start, self.total)

    def drawn(self, epoch: int) -> list[list[int]]:
        """Return what each lane draws in `epoch`, by the oracle."""
        plan, deal = self.plan, self.plan.deal
        return oracle.epoch_of_draws(
            deal.dp, deal.unit, deal.start, self.total, plan.batch_size, plan.window, plan.seed, epoch
        )


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """Any plan of up to 5 lanes."""
    unit = draw(st.integers(1, 6))
    return Plan(
        Deal(draw(st.integers(1, 5)), unit, draw(st.integers(0, 9))),
        batch_size=draw(st.integers(1, 5)),
        window=unit * draw(st.integers(0, 4)),
        seed=draw(st.integers(0, 3)),
    )


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Any plan with a stream of up to 90 samples."""
    plan = draw(plans())
    return Case(plan, plan.deal.start + draw(st.integers(0, 90)))


@st.composite
def filled_cases(draw: st.DrawFn) -> Case:
    """Any plan with a stream that fills at least one batch in every lane."""
    plan = draw(plans())
    return Case(plan, plan.deal.start + plan.deal.dp * plan.batch_size + draw(st.integers(0, 90)))
