"""Megatron's schedulers on lengths alone: which rank would get how much of a global batch.

`cp_balanced` is the class of the installed megatron-core (0.16.1: `megatron.core.pipeline_parallel.hybrid_cp_schedule`)
itself, given lengths in the place of those that it all-gathers. It sorts the rows of a global batch, gives each to the
rank with the least to do by its own estimate, the square of the length, and shares rows above a length among several.

`dp_balanced_costs` restates the rule of `DpBalancedScheduler`, which megatron-core 0.16.1 does not have: Megatron-LM at
commit 00c51e13, `megatron/core/datasets/data_schedule.py`. In spite of its name it does not look at what rows cost:
they are packed as they come, up to a number of tokens, and where the packs are no multiple of the ranks, the last rows
of the last packs become packs of their own. Pack i is rank i % ranks' in micro batch i // ranks.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt

Costs = npt.NDArray[np.float64]
Cost = Callable[[npt.ArrayLike], Costs]


def cp_balanced(ranks: int, most_tokens: int) -> Any:
    """Returns Megatron's own scheduler for so many ranks, each with room for so many tokens of a row; None without it.

    Rows above that are shared by 2, 4, ... ranks.
    """
    try:
        # What it would rather have installed matters on GPUs only.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from megatron.core.pipeline_parallel.hybrid_cp_schedule import BalancedCPScheduler
    except ImportError:
        return None
    group: Any = SimpleNamespace(size=lambda: ranks)
    return BalancedCPScheduler(most_tokens, group)


def cp_balanced_costs(scheduler: Any, lengths: Sequence[int], cost: Cost) -> Costs:
    """Returns what each rank has to do in each group of a global batch, shape (groups, ranks).

    Ranks meet at the end of a group. A row that is shared costs each of its ranks an even share.
    """
    _, groups = scheduler.get_groups_and_subsamples(list(enumerate(lengths)), None)
    each = cost(lengths)
    found = np.zeros((len(groups), scheduler.total_hdp_gpus))
    for number, group in enumerate(groups):
        sharing = np.bincount([row for rows in group for row in rows], minlength=len(lengths))
        for rank, rows in enumerate(group):
            found[number, rank] = sum(each[row] / sharing[row] for row in rows)
    return found


def dp_balanced_costs(ranks: int, lengths: Sequence[int], most_tokens: int, cost: Cost) -> Costs:
    """Returns what each rank has to do in each micro batch of a global batch, shape (micro batches, ranks)."""
    packs: list[list[int]] = [[]]
    tokens = 0
    for length in lengths:
        if tokens + length > most_tokens and packs[-1]:
            packs.append([])
            tokens = 0
        packs[-1].append(length)
        tokens += length
    last = len(packs) - 1
    while len(packs) % ranks:
        while len(packs[last]) < 2:
            last -= 1
        packs.append([packs[last].pop()])
    return np.array([cost(pack).sum() for pack in packs]).reshape(-1, ranks)
