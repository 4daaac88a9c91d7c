"""Which sample a rank draws at a step: integers in, integers out, no files, no clock, no state.

A stream is one endless row of numbered samples. It is **dealt** to one lane per data-parallel rank in stripes of `unit`
samples a lane, each lane may be **shuffled** inside windows of a fixed number of positions, and a map-style data set
lays the lanes' positions out as one **index space**. Here two lanes (`dp=2`) are dealt units of three::

    sample    0  1  2 | 3  4  5 | 6  7  8 | 9 10 11 |12 13 14 15
    lane      0  0  0 | 1  1  1 | 0  0  0 | 1  1  1 | 0  1  0  1
    position  0  1  2 | 0  1  2 | 3  4  5 | 3  4  5 | 6  6  7  7
              `--- stripe 0 ---'  `--- stripe 1 ---'  `- tail, --'
                                                      16 samples

- `deal`: lane and position to sample number, and back; units; samples that are left out.
- `shuffle`: permutations by arithmetic that any language can compute again, windows of positions, and how far a window
  moves neighbours apart.
- `segment`: what is left of an epoch when the number of lanes changes; `course`: what is drawn in a run, through epochs
  and any number of such changes, and when a position may be drawn from a stream that still grows.
- `layout`: data set index to lane and position, and back; shards of any other iterable. `steps`: positions and the
  steps of a trainer; the end of an epoch.
- `blend`, `blend_schedule`: whose turn it is among several streams, also with weights that change; `balance`: rows
  dealt by cost.
- `splitting`: documents cut into sequences, samples put into packs; `sequences`: both, window by window.
"""
