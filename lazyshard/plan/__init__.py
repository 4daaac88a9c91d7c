"""Which sample a rank draws at a step: integers in, integers out, no files, no clock, no state.

A stream is one endless row of numbered samples. It is **dealt** to one lane per data-parallel rank in stripes of `unit`
samples a lane, each lane may be **shuffled** inside windows of a fixed number of positions, and a map-style data set
lays the lanes' positions out as one **index space**. Here two lanes (`dp=2`) are dealt units of three::

    sample    0  1  2 | 3  4  5 | 6  7  8 | 9 10 11 |12 13 14 15
    lane      0  0  0 | 1  1  1 | 0  0  0 | 1  1  1 | 0  1  0  1
    position  0  1  2 | 0  1  2 | 3  4  5 | 3  4  5 | 6  6  7  7
              `--- stripe 0 ---'  `--- stripe 1 ---'  `- tail, --'
                                                      16 samples

- `deal`: lane and position to sample number, and back; how many samples a lane is dealt in a row.
- `shuffle`: permutations by arithmetic that any language can compute again, and windows of positions.
- `lane`: the composition (`Plan`): epochs, windows, and when a position may be drawn from a stream that still grows.
- `segment`, `part`, `course`: what is drawn when the number of lanes changes on the way, by its history; `places`: from
  a sample back to where it is drawn; `gaps`: samples that are left out; `ending`: the end of an epoch.
- `layout`: data set index to lane and position, and back; `steps`: positions and the steps of a trainer.
- `shuffle_distance`: how far a window moves neighbours apart, and the window for a distance.
- `blend`, `blend_schedule`: whose turn it is among several streams, also with weights that change; `balance`: rows
  dealt by cost; `sharding`: any other iterable.
- `splitting`: documents cut into sequences, samples put into packs; `sequences`: both, window by window.
"""
