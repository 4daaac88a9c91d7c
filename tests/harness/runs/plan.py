"""What a run will be, from its seed alone: its stream, its lives, and where each of them is killed."""

import random
from dataclasses import dataclass, replace
from typing import Final, Literal, NamedTuple

from tests.harness.processes.kill_points import WHENS, When

# In what a kill comes: the start of a rank, between two steps, a read, a checkpoint, a commit, a call of the producer,
# wherever everybody happens to be, or when all is trained.
Where = Literal["start", "step", "read", "checkpoint", "commit", "publish", "any", "end"]
Whose = Literal["all", "job", "one"]  # the producer too; all ranks; one, and then the others one by one
_RARE: Final[tuple[Where, ...]] = ("start", "end")
BLEND_INDICES: Final = 3000  # More than any blend here has
# About as many calls are made in each
_MOST_CALLS: Final = {"start": 10, "read": 2, "checkpoint": 5, "commit": 6, "publish": 30}


class Kill(NamedTuple):
    where: Where  # in what
    share: float  # at which step, as a share of those that are left when the life begins
    rank: int  # of whom, where that is open
    call: int  # the number of the call in it, from 1
    when: When  # where in the call
    whose: Whose  # who is killed
    delay_s: float  # after the step, where the instant is not tied to a call


@dataclass(frozen=True, slots=True)
class LifePlan:
    dp: int  # ranks
    batch_size: int  # samples of a rank in a micro batch
    workers: int  # DataLoader workers of a rank; 0 reads without a DataLoader
    iterable: bool  # reads by the iterable form
    early: bool  # commits what it continues from before anything is read
    every: int  # steps between two checkpoints
    back: int  # from which checkpoint it continues: 0 the newest, 1 the one before, and so on, or the oldest
    kill: Kill | None  # how it ends; None for the last one
    weights: tuple[int, ...] = (1,)  # of the streams that are blended; 0 for one that is left out


@dataclass(frozen=True, slots=True)
class RunPlan:
    seed: int  # what it is made from; the shuffle's seed too
    samples: int  # rows of the stream
    per_chunk: int  # rows of a chunk
    unit: int  # samples that a rank gets in a row
    window: int  # chunks that are shuffled together; 0 keeps the order
    layout: Literal["block", "strided"]  # of the index space
    limit: int | None  # `max_total_samples`
    indices: int | None  # `num_samples`
    keep: int  # checkpoints that are kept
    pace: tuple[str, ...]  # options by which the producer is kept slower than the ranks
    deaths: tuple[int, ...]  # changes after which producers die alone, one after another
    lives: tuple[LifePlan, ...]  # the last one is not killed
    retain: Literal["consumed", "all"] = "consumed"  # what the producer keeps
    patience_s: float = 45.0  # how long the ranks may take for a step, on a machine that is very busy
    others: "tuple[RunPlan, ...]" = ()  # the other streams of a blend; none where one is trained

    @property
    def streams(self) -> "tuple[RunPlan, ...]":
        return (self, *self.others)

    @property
    def total(self) -> int:
        return self.samples if self.limit is None else min(self.samples, self.limit)

    @property
    def window_samples(self) -> int:
        return -(-self.window * self.per_chunk // self.unit) * self.unit


def make_plan(seed: int) -> RunPlan:
    dice = random.Random(f"run {seed}")
    samples = dice.randint(60, 150)
    per_chunk = dice.randint(3, 6)
    more, less = dice.randint(0, 60), dice.randint(1, 20)
    limit, indices = dice.choice([(samples + more, None), (samples, None), (samples - less, None), (None, 400)])
    kills = dice.randint(3, 5)
    return RunPlan(
        seed=seed,
        samples=samples,
        per_chunk=per_chunk,
        unit=dice.choice([per_chunk, per_chunk, 1, 2]),
        window=dice.choice([0, 0, 1, 2, 3]),
        layout=dice.choice(["block", "strided"]),
        limit=limit,
        indices=indices,
        keep=dice.randint(2, 3),
        pace=_pace(dice),
        deaths=tuple(dice.randint(1, 400) for _ in range(dice.choice([0, 0, 1, 2]))),
        lives=tuple(_life(dice, last=number == kills) for number in range(kills + 1)),
    )


def _pace(dice: random.Random) -> tuple[str, str]:
    chunks, samples, rate = dice.randint(1, 8), dice.randint(8, 40), dice.randint(300, 1200)
    return dice.choice([("--max-ahead", f"{chunks}"), ("--max-ahead", f"{samples}samples"), ("--rate", f"{rate}")])


def make_blend_plan(seed: int) -> RunPlan:
    """Returns the run of a seed over a blend: two or three streams, whose weights change from life to life."""
    dice = random.Random(f"blend {seed}")
    count, bounded = dice.choice([2, 2, 3]), dice.random() < 0.5
    streams = []
    for _ in range(count):
        stream = make_plan(dice.getrandbits(32))
        limit = stream.samples + dice.randint(-20, 40) if bounded else None
        streams.append(replace(stream, seed=seed, limit=limit, indices=None if bounded else BLEND_INDICES, lives=()))
    lives, weights = [], _weights(dice, count)
    for life in make_plan(dice.getrandbits(32)).lives:
        lives.append(replace(life, weights=weights))
        if dice.random() < 0.5:
            weights = _weights(dice, count)
    return replace(streams[0], keep=dice.randint(2, 3), lives=tuple(lives), others=tuple(streams[1:]))


def _weights(dice: random.Random, streams: int) -> tuple[int, ...]:
    weights = [dice.randint(1, 4) for _ in range(streams)]
    if dice.random() < 0.3:
        weights[dice.randrange(1, streams)] = 0  # Not the first: a state continues with none but streams that it knows
    return tuple(weights)


def _life(dice: random.Random, *, last: bool) -> LifePlan:
    dp = dice.randint(1, 5)
    many = dice.random() < 0.12
    return LifePlan(
        dp=dp,
        batch_size=dice.choice([1, 1, 2, 3]),
        workers=dice.randint(1, 2) if many else 0,
        iterable=dice.random() < 0.2,
        early=dice.random() < 0.5,
        every=dice.randint(1, 5),
        back=dice.choice([0, 0, 0, 1, 1, 2]),
        kill=None if last else _kill(dice, dp),
    )


def _kill(dice: random.Random, dp: int) -> Kill:
    where = dice.choice(_RARE if dice.random() < 0.15 else ("step", "read", "checkpoint", "commit", "publish", "any"))
    whose: Whose = "all" if where == "publish" else dice.choice(["all", "job", "one"])
    return Kill(
        where=where,
        share=dice.random() * 0.7,
        rank=0 if where in ("checkpoint", "commit", "end") else dice.randrange(dp),
        call=dice.randint(1, _MOST_CALLS.get(where, 2)),
        when=dice.choice(WHENS),
        whose=whose,
        delay_s=dice.random() * 0.004,
    )
