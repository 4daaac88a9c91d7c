"""States of runs as targets of fuzzing: a checkpoint may hold anything; a data set goes on from it or refuses it.

What must hold: `load_state_dict` returns or raises a `LazyShardError`, soon and in bounded memory. If it returns, what
is left draws samples of the stream, none of them twice in what is left of the epoch.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any, Final

import numpy as np
import orjson
import torch

from lazyshard import LazyShardedDataset
from lazyshard.errors import LazyShardError, StateInvalid
from lazyshard.format import PartState, RunState
from tests.harness.fuzz.mutations import alter_json
from tests.harness.fuzz.streams import STREAMS, Known

__all__ = ["NOT_OF_JSON", "check_message", "check_row", "check_state", "drawn_state", "put_streams"]

NOT_OF_JSON: Final[tuple[Any, ...]] = (
    b"bytes",
    float("nan"),
    float("inf"),
    -float("inf"),
    np.int64(3),
    np.float32(1.5),
    torch.tensor(3),
    torch.zeros(2),
    (1, 2),
    {1: 2},
    {1, 2},
    2**100,
    1j,
    object(),
    RunState,
    range(3),
)
"""What a pickle may hold as well."""

_STREAMS: Final = ("ended", "live", "retired", "one", "empty")


def put_streams(place: Path) -> dict[str, Path]:
    """Writes the streams that are gone on with, alone or in blends."""
    names = (*_STREAMS, "foreign", "foreign-live")
    for name in names:
        STREAMS[name].put(place / name)
    return {name: place / name for name in names}


def drawn_state(random: Random) -> tuple[Known, Any, dict[str, Any]]:
    """Returns a stream, a state that may be of it, and the settings to go on with."""
    known = STREAMS[random.choice(_STREAMS)]
    options: dict[str, Any] = {"batch_size": random.choice((1, 1, 2)), "shuffle_window": random.choice((0, 1))}
    if not known.ended:
        options["max_total_samples"] = random.choice((len(known.rows), len(known.rows), 100))
    if random.randrange(4) == 0:
        options["num_samples"] = random.choice((4, 50))
    window = options["shuffle_window"] * known.per_chunk
    parts = tuple(_part(random, number) for number in range(random.randint(1, 3)))
    parts = tuple(replace(part, first_step=number) for number, part in enumerate(parts))
    state: Any = RunState(
        "5f0c1a9be7d24c3f8a6b0e1d2c3b4a59",
        known.per_chunk,
        known.per_chunk,
        window,
        0,
        options.get("max_total_samples"),
        parts,
        min(2**62, sum(part.dp * part.draws for part in parts if part.trained)),
    ).to_dict()
    way = random.randrange(6)
    if way == 0:
        try:
            state = orjson.loads(alter_json(orjson.dumps(state), random))
        except orjson.JSONDecodeError:
            state = None
    elif way == 1:
        state[random.choice(list(state))] = random.choice(NOT_OF_JSON)
    elif way == 2:
        state["parts"][0][random.choice(list(state["parts"][0]))] = random.choice(NOT_OF_JSON)
    elif way == 3:
        state = random.choice(
            (*NOT_OF_JSON, {"model": {}, "lazyshard": state}, [state], orjson.dumps(state), str(state))
        )
    return known, state, options


def check_state(directory: Path, known: Known, state: Any, options: dict[str, Any], dp: int) -> bool:
    """Asserts what must hold for any state; returns whether it was taken."""
    dataset = LazyShardedDataset(directory, dp_rank=dp - 1, dp_size=dp, max_wait=0, on_bad_sample="raise", **options)
    try:
        dataset.load_state_dict(state)
        left = dataset.rank_indices
    except LazyShardError as error:
        check_message(error)
        if isinstance(error, StateInvalid):
            assert str(error).startswith(str(directory)), str(error)[:200]
        return False
    except ValueError as error:
        # A stream that is shorter than one batch of every rank.
        assert "num_samples is at least" in str(error), str(error)
        return False
    seen: set[tuple[int, int]] = set()
    for index in left[:12]:
        try:
            draw = dataset.draw(index)
            assert (draw.epoch, draw.sample) not in seen, f"sample {draw.sample} twice"
            seen.add((draw.epoch, draw.sample))
            check_row(known, draw.sample, dataset[index])
        except LazyShardError:
            break
        except IndexError as error:
            # The stream has ended with fewer samples than one batch of every rank.
            assert "an epoch is empty" in str(error), str(error)
            break
    dataset.state_dict()
    return True


def check_message(error: LazyShardError) -> None:
    """Asserts that a refusal says something, and no more than a person reads."""
    assert str(error), "no message"
    assert len(str(error)) <= 1000, f"a message of {len(str(error))} characters"


def check_row(known: Known, sample: int, row: Any) -> None:
    """Asserts that a sample is what its stream holds."""
    assert row == orjson.loads(known.rows[sample] or b"null"), f"sample {sample} is {str(row)[:80]}"


def _part(random: Random, number: int) -> PartState:
    skip = tuple((start, start + random.randint(1, 2)) for start in (0, 3, 10**9) if not random.randrange(4))
    wild = not random.randrange(6)
    return PartState(
        random.choice((2**31, 2**20 + 1, 1000, 3)) if wild else random.choice((1, 2)),
        random.choice((1, 2, 2**62)) if wild else 1,
        random.choice((2**29, 10**9, 5)) if wild and random.randrange(2) else random.randint(0, 3),
        random.choice((None, None, number, 2**62 if wild else 1)),
        bool(random.randrange(5)),
        skip,
        0,
        random.choice((0, 1, 2**62)) if wild else 0,
    )
