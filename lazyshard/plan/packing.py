"""Whole samples put together into packs of at most so many tokens: best fit, longest first.

Samples are taken by length, the longest first, and each goes into the pack in which the least room is left behind it;
where it fits into none, a pack is opened. That is best-fit decreasing (Johnson, Demers, Ullman, Garey and Graham,
"Worst-case performance bounds for simple one-dimensional packing algorithms", SIAM Journal on Computing 3, 1974), at
most 11/9 of the fewest packs there can be and a few. For training it was proposed by Ding et al., "Fewer truncations
improve language modeling", 2024 (https://arxiv.org/abs/2404.10830), which finds the pack in a tree over the capacity.

Here packs are kept by the room that is left in them, so that all with the same room are one entry of a sorted list, and
the tightest is found by bisection: O(log d) a sample, and d entries of 8 bytes to be moved, d being how many different
rooms there are, never more than packs.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

__all__ = ["efficiency", "pack_samples"]


def pack_samples(lengths: Sequence[int] | npt.NDArray[np.integer], capacity: int) -> list[list[int]]:
    """Returns packs of samples; each sample is in one of them, whole.

    The same lengths give the same packs, everywhere. Packs come in the order in which the longest sample of each stands
    (of equally long ones the first), so neither long nor short samples come first; samples of a pack come in the order
    in which they stand. At most one pack is half empty or emptier.

    Args:
        lengths: of shape (samples,): tokens of each sample, from 1 to the capacity.
        capacity: most tokens of a pack.

    Returns:
        For each pack the indices of its samples, rising.

    Raises:
        ValueError: the capacity is below 1, or a length not from 1 to the capacity.
    """
    if capacity < 1:
        raise ValueError(f"capacity is a number of tokens from 1, got {capacity}")
    sizes = np.asarray(lengths, dtype=np.int64)
    if not len(sizes):
        return []
    wrong = np.flatnonzero((sizes < 1) | (sizes > capacity))
    if len(wrong):
        raise ValueError(f"lengths are from 1 to {capacity}, got {sizes[wrong[0]]} for sample {wrong[0]}")
    order = np.argsort(-sizes, kind="stable")
    shortest = int(sizes[order[-1]])
    packs: list[list[int]] = []
    rooms: list[int] = []  # in packs that are open, each once, rising
    with_room: dict[int, list[list[int]]] = {}
    for sample, size in zip(order.tolist(), sizes[order].tolist(), strict=True):
        at = bisect_left(rooms, size)
        if at == len(rooms):
            pack = [sample]
            packs.append(pack)
            room = capacity - size
        else:
            room = rooms[at]
            there = with_room[room]
            pack = there.pop()
            if not there:
                del rooms[at], with_room[room]
            pack.append(sample)
            room -= size
        if room >= shortest:
            others = with_room.get(room)
            if others is None:
                rooms.insert(bisect_left(rooms, room), room)
                with_room[room] = [pack]
            else:
                others.append(pack)
    # The longest of a pack is the one that has opened it.
    packs.sort(key=lambda pack: pack[0])
    for pack in packs:
        pack.sort()
    return packs


def efficiency(lengths: Sequence[int] | npt.NDArray[np.integer], packs: int, capacity: int) -> float:
    """Returns what part of the packs is filled, from 0 to 1; 1 for no packs.

    Args:
        lengths: of shape (samples,): tokens of each sample.
        packs: how many they fill.
        capacity: most tokens of a pack.
    """
    return int(np.sum(np.asarray(lengths, dtype=np.int64))) / (packs * capacity) if packs else 1.0
