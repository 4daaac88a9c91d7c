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
- `shuffle_distance`: how far a window moves neighbours apart, and the window for a distance
- `segment`, `course`: what is drawn when the number of lanes changes on the way: any number of times, by its history;
  `carried`: what one segment takes over from the one before; `places`: from a sample back to where it is drawn.
- `ending`: what is left over at the end of an epoch, and the batch that is completed with it.
- `steps`: positions and the steps of a trainer; `blend`: whose turn it is among several streams;
  `blend_table`, `blend_course`: the same for any position at once, and with weights that change.
- `layout`: data set index to lane and position, and back; `unit`: how many samples a lane is dealt in a row.
- `packing`: whole samples put together into packs of at most so many tokens; `splitting`: documents cut into sequences
  of exactly so many; `sequences`: both, window by window, and how what comes of it is dealt; `sequence_tokens`: the
  tokens of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from lazyshard.lazy import lazily

if TYPE_CHECKING:
    from lazyshard.plan.course import Course
    from lazyshard.plan.deal import Deal
    from lazyshard.plan.ending import AtEnd, Ending
    from lazyshard.plan.gaps import Gaps
    from lazyshard.plan.lane import Draw, Plan, Run
    from lazyshard.plan.layout import BlockLayout, Layout, StridedLayout, make_layout
    from lazyshard.plan.packing import pack_samples
    from lazyshard.plan.part import Part
    from lazyshard.plan.places import Place
    from lazyshard.plan.segment import Rules
    from lazyshard.plan.shuffle import mix64, permutation
    from lazyshard.plan.shuffle_distance import window_for_distance
    from lazyshard.plan.unit import UNIT_NAMES, auto_unit, named_unit, window_positions

__all__ = [
    "UNIT_NAMES",
    "AtEnd",
    "BlockLayout",
    "Course",
    "Deal",
    "Draw",
    "Ending",
    "Gaps",
    "Layout",
    "Part",
    "Place",
    "Plan",
    "Rules",
    "Run",
    "StridedLayout",
    "auto_unit",
    "make_layout",
    "mix64",
    "named_unit",
    "pack_samples",
    "permutation",
    "window_for_distance",
    "window_positions",
]

_HOMES: Final = {
    "course": ("Course",),
    "deal": ("Deal",),
    "ending": (
        "AtEnd",
        "Ending",
    ),
    "gaps": ("Gaps",),
    "lane": (
        "Draw",
        "Plan",
        "Run",
    ),
    "layout": (
        "BlockLayout",
        "Layout",
        "StridedLayout",
        "make_layout",
    ),
    "packing": ("pack_samples",),
    "part": ("Part",),
    "places": ("Place",),
    "segment": ("Rules",),
    "shuffle": (
        "mix64",
        "permutation",
    ),
    "shuffle_distance": ("window_for_distance",),
    "unit": (
        "UNIT_NAMES",
        "auto_unit",
        "named_unit",
        "window_positions",
    ),
}

__getattr__ = lazily(__name__, _HOMES)
