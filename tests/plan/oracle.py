"""The plan again, in lists of sample numbers, dealt, cut and reordered one by one; no code is the package's."""

import math
from collections.abc import Sequence
from fractions import Fraction


def splitmix_output(state: int) -> int:
    """Return the output of SplitMix64 at `state`, already advanced."""
    z = state % 2**64
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
    return z ^ (z >> 31)


def permutation(size: int, key: Sequence[int]) -> list[int]:
    """Order 0 .. size-1 by 64-bit words made from `key`."""
    golden = 0x9E3779B97F4A7C15
    base = 0
    for part in key:
        base = splitmix_output((base ^ part) + golden)
    return sorted(range(size), key=lambda i: splitmix_output(base + (i + 1) * golden))


def dealt(dp: int, unit: int, start: int, total: int) -> list[list[int]]:
    """Deal samples [start, total) to `dp` lanes: units while there is one for every lane, then one by one."""
    return left_dealt(list(range(start, total)), dp, unit, 0)


def shuffled(lane: list[int], window: int, seed: int, epoch: int, number: int) -> list[int]:
    """Reorder lane `number` inside its windows for one epoch."""
    if not window:
        return lane
    order = []
    for w in range(0, len(lane), window):
        piece = lane[w : w + window]
        order += [piece[i] for i in permutation(len(piece), (seed, epoch, number, w // window))]
    return order


def ended(lanes: list[list[int]], batch_size: int, at_end: str) -> list[list[int]]:
    """Return what each lane draws of an epoch, given all that it holds, in order.

    "drop" leaves what fills no batch of every lane; "pad" completes one with the last ones before, "loop" with the
    first ones.
    """
    whole = min(map(len, lanes)) // batch_size * batch_size
    drawn = [lane[:whole] for lane in lanes]
    left = [lane[whole:] for lane in lanes]
    if at_end == "drop" or not any(left):
        return drawn
    order = [lane[position] for position in range(max(map(len, lanes))) for lane in lanes if position < len(lane)]
    missing = len(lanes) * batch_size - sum(map(len, left))
    others = [sample for sample in order if not any(sample in each for each in left)]
    if len(order) < len(lanes) * batch_size:
        others = order * missing
    fill = iter(others[:missing] if at_end == "loop" else others[-missing:])
    for position in range(batch_size):
        for each in left:
            if position == len(each):
                each.append(next(fill))
    return [before + each for before, each in zip(drawn, left, strict=True)]


def slices(numbers: list[int], lanes: int) -> list[list[int]]:
    """Cut a list into contiguous slices, the first ones longer by one."""
    each, more = divmod(len(numbers), lanes)
    cut = []
    for lane in range(lanes):
        size = each + (lane < more)
        cut.append(numbers[:size])
        numbers = numbers[size:]
    return cut


def left_dealt(left: list[int], dp: int, unit: int, turn: int) -> list[list[int]]:
    """Deal a list: units while there is one for every lane, then one by one from the lane `turn` on."""
    lanes: list[list[int]] = [[] for _ in range(dp)]
    left = list(left)
    while len(left) >= dp * unit:
        for lane in lanes:
            lane.extend(left[:unit])
            del left[:unit]
    for number, sample in enumerate(left):
        lanes[(turn + number) % dp].append(sample)
    return lanes


def split_owners(shares: Sequence[int], total: int) -> list[int]:
    """Return the split of each sample: of those left, each split in turn takes the ones at which its share grows."""
    owners, period = [0] * total, sum(shares)
    for first in range(0, total, period):
        left = list(range(first, first + period))
        for split, share in enumerate(shares):
            size = [math.ceil(Fraction(number * share, len(left))) for number in range(len(left) + 1)] if left else []
            own = [sample for at, sample in enumerate(left) if size[at + 1] > size[at]]
            for sample in own:
                if sample < total:
                    owners[sample] = split
            left = [sample for sample in left if sample not in own]
    return owners


def course_of_draws(
    unit: int, window: int, seed: int, parts: Sequence[tuple[int, int, int, Sequence[tuple[int, int]]]], total: int
) -> list[list[list[tuple[int, int]]]]:
    """Return what each lane of each part draws: (epoch, sample).

    Parts are lanes, micro batch, draws, and ranges of samples left out from there on.
    """
    span = window or unit
    epoch, carried, left = 0, list[int](), list(range(total))
    out: set[int] = set()
    drawn: list[list[list[tuple[int, int]]]] = []
    lanes, own, at = list[list[int]](), list[list[int]](), 0
    for dp, batch_size, draws, ranges in parts:
        out |= {sample for start, stop in ranges for sample in range(start, stop)}
        result: list[list[tuple[int, int]]] = [[] for _ in range(dp)]
        goes_on = len(drawn) > 0 and len(drawn[-1]) == dp and not ranges
        if drawn and not goes_on:
            opened = max(0, *(-(-(at - len(own[lane])) // span) for lane in range(len(own))))
            carried = [s for lane in range(len(own)) for s in lanes[lane][at : len(own[lane]) + opened * span]]
            left = left[opened * span * len(own) :]
        while True:
            if not goes_on:
                carried = [sample for sample in carried if sample not in out]
                left = [sample for sample in left if sample not in out]
                own = slices(carried, dp)
                fresh = left_dealt(left, dp, unit, len(carried) % dp)
                lanes = [own[lane] + shuffled(fresh[lane], window, seed, epoch, lane) for lane in range(dp)]
                at = 0
            goes_on = False
            length = (min(map(len, lanes)) - at) // batch_size * batch_size
            take = min(length, draws - len(result[0]))
            for lane in range(dp):
                result[lane] += [(epoch, sample) for sample in lanes[lane][at : at + take]]
            at += take
            if len(result[0]) == draws:
                break
            epoch, carried, left = epoch + 1, [], list(range(total))
        drawn.append(result)
    return drawn


def turns(parts: Sequence[int], count: int) -> list[int]:
    """Choose a stream draw by draw: the greatest share * max(draws, 1) - drawn, in fractions, the first of equals."""
    of = [Fraction(part, sum(parts)) for part in parts]
    drawn, order = [0] * len(parts), []
    for draw in range(count):
        errors = [share * max(draw, 1) - had for share, had in zip(of, drawn, strict=True)]
        stream = errors.index(max(errors))
        drawn[stream] += 1
        order.append(stream)
    return order
