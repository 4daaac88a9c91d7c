"""States of runs over blends as targets of fuzzing, as `tests.harness.fuzz.states` for those over one stream.

What must hold: `load_state_dict` returns or raises a `LazyShardError`, soon and in bounded memory. If it returns, every
draw is a sample of its stream.
"""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any, Final

import orjson

from lazyshard import BlendedDataset, LazyShardedDataset
from lazyshard.errors import LazyShardError, StateInvalid
from tests.harness.fuzz.mutations import alter_json
from tests.harness.fuzz.states import NOT_OF_JSON, check_message, check_row
from tests.harness.fuzz.streams import STREAMS

__all__ = ["check_blend", "drawn_blend"]

_STREAMS: Final = ("ended", "foreign", "foreign-live")
"""Streams of ours here have all the same identity, so a blend has one of them."""

_WILD: Final = (2**62, 2**53, 2**31, 2**20 + 1, 10**9, 1000, -1)


def opened(streams: dict[str, Path], weights: dict[str, int], dp: int) -> BlendedDataset:
    """Opens a blend for the last of so many ranks."""
    parts = []
    for name, weight in weights.items():
        size = None if STREAMS[name].native else STREAMS[name].per_chunk
        own = LazyShardedDataset(
            streams[name], dp_rank=dp - 1, dp_size=dp, samples_per_chunk=size, max_wait=0, on_bad_sample="raise"
        )
        parts.append((own, weight))
    return BlendedDataset(parts, num_samples=60, batch_size=2, micro_batches_per_step=1)


def drawn_blend(streams: dict[str, Path], random: Random) -> tuple[dict[str, int], Any]:
    """Returns weights to go on with, and a state that may be of that blend."""
    weights = {name: random.randint(1, 3) for name in _STREAMS if random.randrange(3)} or {"ended": 1}
    state: Any = opened(streams, weights, 1).state_dict(2 * random.randint(0, 3))
    if random.randrange(2):
        weights = {name: random.randint(1, 3) for name in _STREAMS if random.randrange(3)} or weights
        again = opened(streams, weights, 2)
        try:
            again.load_state_dict(state)
            state = again.state_dict(again.consumed + 4 * random.randint(0, 2))
        except LazyShardError:
            # None of the streams, or one that has been drawn from beyond what it has.
            pass
    way = random.randrange(6)
    part = random.choice(state["parts"])
    if way == 0:
        try:
            state = orjson.loads(alter_json(orjson.dumps(state), random))
        except orjson.JSONDecodeError:
            state = None
    elif way == 1:
        state[random.choice(list(state))] = random.choice(NOT_OF_JSON)
    elif way == 2:
        part[random.choice(list(part))] = random.choice(NOT_OF_JSON)
    elif way == 3:
        part[random.choice(("dp", "batch_size", "draws", "first_step", "draws_per_step", "epoch"))] = random.choice(
            _WILD
        )
    elif way == 4:
        first, parts, offset = random.choice(part["pieces"])
        wild = [random.choice((*_WILD, 1, 0)) for _ in parts]
        part["pieces"] = [[first, random.choice((parts, wild)), random.choice((offset, *_WILD))]]
    else:
        part["begins"] = [[random.choice((0, 1, *_WILD)), random.choice((0, 1, *_WILD))] for _ in part["begins"]]
    return weights, state


def check_blend(streams: dict[str, Path], weights: dict[str, int], state: Any, dp: int) -> bool:
    """Asserts what must hold for any state; returns whether it was taken."""
    blend = opened(streams, weights, dp)
    try:
        blend.load_state_dict(state)
        left = blend.rank_indices
    except LazyShardError as error:
        check_message(error)
        if isinstance(error, StateInvalid):
            assert "the state" in str(error), str(error)[:200]
        return False
    names = list(weights)
    for index in left[:12]:
        try:
            number, draw = blend.draw(index)
            check_row(STREAMS[names[number]], draw.sample, blend[index])
        except LazyShardError:
            break
        except IndexError as error:
            # A stream has ended with fewer samples than there are ranks.
            assert "an epoch is empty" in str(error), str(error)
            break
    blend.state_dict()
    return True
