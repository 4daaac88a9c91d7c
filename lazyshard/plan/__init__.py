"""Which sample a rank draws at a step: integers in, integers out, no files, no clock, no state.

A stream is one endless row of numbered samples. It is **dealt** to one lane per data-parallel rank in stripes of `unit`
samples a lane, each lane may be **shuffled** inside windows of a fixed number of positions, and a map-style data set
lays the lanes' positions out as one **index space**. Here two lanes (`dp=2`) are dealt units of three::

    sample    0  1  2 | 3  4  5 | 6  7  8 | 9 10 11 |12 13 14 15
    lane      0  0  0 | 1  1  1 | 0  0  0 | 1  1  1 | 0  1  0  1
    position  0  1  2 | 0  1  2 | 3  4  5 | 3  4  5 | 6  6  7  7
              `--- stripe 0 ---'  `--- stripe 1 ---'  `- tail, --'
                                                      16 samples

- `deal`: lane and position to sample number, and back.
- `shuffle`: the permutations, defined by arithmetic so that any language can compute them again.
- `lane`: the composition (`Plan`): epochs, windows, and when a position may be drawn from a stream that still grows.
- `windows`: positions shuffled inside windows; `gaps`: samples that are left out.
- `segment`, `course`: what is drawn when the number of lanes changes on the way: any number of times, by its history.
- `steps`: positions and the steps of a trainer; `blend`: whose turn it is among several streams.
- `layout`: data set index to lane and position, and back.
"""

from __future__ import annotations

from lazyshard.plan.course import Course, Part, Place
from lazyshard.plan.deal import Deal
from lazyshard.plan.gaps import Gaps
from lazyshard.plan.lane import Draw, Plan, Run
from lazyshard.plan.layout import BlockLayout, Layout, StridedLayout, make_layout
from lazyshard.plan.segment import Rules
from lazyshard.plan.shuffle import mix64, permutation

__all__ = [
    "BlockLayout",
    "Course",
    "Deal",
    "Draw",
    "Gaps",
    "Layout",
    "Part",
    "Place",
    "Plan",
    "Rules",
    "Run",
    "StridedLayout",
    "make_layout",
    "mix64",
    "permutation",
]
