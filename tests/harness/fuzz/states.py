"""States as targets of fuzzing: each is refused soon and in bounded memory, or leaves draws of which none is twice."""

import contextlib
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any, Final

import numpy as np
import orjson
import torch

from lazyshard import BadRows, BlendedDataset, LazyShardedDataset, Order
from lazyshard.errors import LazyShardError, StateInvalid
from lazyshard.format.state import RunState
from lazyshard.part import Part
from tests.data.options import grouped
from tests.harness.fuzz.damage import ID, STREAMS, Known, alter_json

NOT_OF_JSON: Final[tuple[Any, ...]] = (  # What a pickle may hold as well
    *(b"bytes", float("nan"), float("inf"), -float("inf"), np.int64(3), np.float32(1.5), torch.tensor(3)),
    *(torch.zeros(2), (1, 2), {1: 2}, {1, 2}, 2**100, 1j, object(), RunState, range(3)),
)

_STREAMS: Final = ("ended", "live", "retired", "one", "empty")


def put_streams(place: Path) -> dict[str, Path]:
    names = (*_STREAMS, "foreign", "foreign-live")
    for name in names:
        STREAMS[name].put(place / name)
    return {name: place / name for name in names}


def drawn_state(random: Random) -> tuple[Known, Any, dict[str, Any]]:
    known = STREAMS[random.choice(_STREAMS)]
    options: dict[str, Any] = {"batch_size": random.choice((1, 1, 2)), "shuffle_window": random.choice((0, 1))}
    if not known.ended:
        options["max_total_samples"] = random.choice((len(known.rows), len(known.rows), 100))
    if random.randrange(4) == 0:
        options["num_samples"] = random.choice((4, 50))
    window = options["shuffle_window"] * known.per_chunk
    parts = tuple(_part(random, number) for number in range(random.randint(1, 3)))
    consumed = min(2**62, sum(part.dp * part.draws for part in parts if part.trained))
    unit, end = known.per_chunk, options.get("max_total_samples")
    state: Any = RunState(ID, unit, unit, window, 0, end, parts, consumed).to_dict()
    way = random.randrange(6)
    if way == 3:
        state = random.choice((*NOT_OF_JSON, {"a": {}, "lazyshard": state}, [state], orjson.dumps(state), str(state)))
    return known, _spoilt(state, state["parts"][0], way, random) if way < 3 else state, options


def _spoilt(state: Any, part: Any, way: int, random: Random) -> Any:
    if way == 0:
        try:
            return orjson.loads(alter_json(orjson.dumps(state), random))
        except orjson.JSONDecodeError:
            return None
    where = state if way == 1 else part
    where[random.choice(list(where))] = random.choice(NOT_OF_JSON)
    return state


def _part(random: Random, number: int) -> Part:
    skip = tuple((start, start + random.randint(1, 2)) for start in (0, 3, 10**9) if not random.randrange(4))
    wild = not random.randrange(6)
    return Part(
        random.choice((2**31, 2**20 + 1, 1000, 3)) if wild else random.choice((1, 2)),
        random.choice((1, 2, 2**62)) if wild else 1,
        random.choice((2**29, 10**9, 5)) if wild and random.randrange(2) else random.randint(0, 3),
        random.choice((None, None, number, 2**62 if wild else 1)),
        bool(random.randrange(5)),
        skip,
        number,
        random.choice((0, 1, 2**62)) if wild else 0,
    )


def check_state(directory: Path, known: Known, state: Any, options: dict[str, Any], dp: int) -> bool:
    rest = grouped(options) | {"bad_rows": BadRows("raise")}
    dataset = LazyShardedDataset(directory, dp_rank=dp - 1, dp_size=dp, max_wait=0, **rest)
    seen: set[tuple[int, int]] = set()

    def drawn(index: int) -> tuple[Known, int]:
        draw = dataset.draw(index)
        assert (draw.epoch, draw.sample) not in seen, f"sample {draw.sample} twice"
        seen.add((draw.epoch, draw.sample))
        return known, draw.sample

    try:
        return _goes_on(dataset, state, str(directory), drawn)
    except ValueError as error:
        assert "num_samples must be at least" in str(error), str(error)  # Shorter than one batch of every rank
        return False


def _goes_on(
    dataset: LazyShardedDataset | BlendedDataset, state: Any, named: str, drawn: Callable[[int], tuple[Known, int]]
) -> bool:
    try:
        dataset.load_state_dict(state)
        left = dataset.rank_indices
    except LazyShardError as error:
        assert 0 < len(str(error)) <= 1000, f"a message of {len(str(error))} characters"
        assert not isinstance(error, StateInvalid) or named in str(error), str(error)[:200]
        return False
    for index in left[:12]:
        try:
            known, sample = drawn(index)
            row = dataset[index]
            assert row == orjson.loads(known.rows[sample] or b"null"), f"sample {sample} is {str(row)[:80]}"
        except LazyShardError:
            break
        except IndexError as error:
            assert "an epoch is empty" in str(error), str(error)  # Shorter than one batch of every rank
            break
    dataset.state_dict()
    return True


_BLENDED: Final = ("ended", "foreign", "foreign-live")  # Of ours, which have one identity, only one
_WILD: Final = (2**62, 2**53, 2**31, 2**20 + 1, 10**9, 1000, -1)


def opened(streams: dict[str, Path], weights: dict[str, int], dp: int) -> BlendedDataset:
    ranks: dict[str, Any] = {"dp_rank": dp - 1, "dp_size": dp, "max_wait": 0, "bad_rows": BadRows("raise")}
    parts = [
        (LazyShardedDataset(streams[name], samples_per_chunk=STREAMS[name].size, **ranks), weight)
        for name, weight in weights.items()
    ]
    return BlendedDataset(parts, num_samples=60, batch_size=2, order=Order(micro_batches_per_step=1))


def drawn_blend(streams: dict[str, Path], random: Random) -> tuple[dict[str, int], Any]:
    weights = {name: random.randint(1, 3) for name in _BLENDED if random.randrange(3)} or {"ended": 1}
    state: Any = opened(streams, weights, 1).state_dict(2 * random.randint(0, 3))
    if random.randrange(2):
        weights = {name: random.randint(1, 3) for name in _BLENDED if random.randrange(3)} or weights
        again = opened(streams, weights, 2)
        with contextlib.suppress(LazyShardError):  # None of its streams may be there, or all of one drawn
            again.load_state_dict(state)
            state = again.state_dict(again.consumed + 4 * random.randint(0, 2))
    way = random.randrange(6)
    part = random.choice(state["parts"])
    if way < 3:
        return weights, _spoilt(state, part, way, random)
    if way == 3:
        name = random.choice(("dp", "batch_size", "draws", "first_step", "draws_per_step", "epoch"))
        part[name] = random.choice(_WILD)
    elif way == 4:
        first, parts, offset = random.choice(part["pieces"])
        wild = [random.choice((*_WILD, 1, 0)) for _ in parts]
        part["pieces"] = [[first, random.choice((parts, wild)), random.choice((offset, *_WILD))]]
    else:
        part["begins"] = [[random.choice((0, 1, *_WILD)), random.choice((0, 1, *_WILD))] for _ in part["begins"]]
    return weights, state


def check_blend(streams: dict[str, Path], weights: dict[str, int], state: Any, dp: int) -> bool:
    blend, names = opened(streams, weights, dp), list(weights)

    def drawn(index: int) -> tuple[Known, int]:
        number, draw = blend.draw(index)
        return STREAMS[names[number]], draw.sample

    return _goes_on(blend, state, "the state", drawn)
