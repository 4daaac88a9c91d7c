"""The files of a stream directory as values: encode, decode, validate. No I/O, no clock.

- `names`: file names; `fields`: how values of other people's making are read
- `records`: manifest, head, end, owner, retired mark; `cursor`: cursors and hints
- `seal`: the seal of a chunk, and what it says of the sources of the rows
- `row`: one line of a chunk; `arrays`: arrays in rows; `batch`: many at a time, encoded rows, packs
- `state`: what a run needs to go on, in checkpoints and cursors; `blend_state`: of several streams
- not of the directory: `kept_sample`, a sample in the cache of a node; `indexed`, Megatron's index

The specification for other languages is `docs/format.md`.
"""
