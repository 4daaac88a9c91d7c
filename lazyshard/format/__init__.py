"""The files of a stream directory as values: encode, decode, validate. No I/O, no clock.

- `names`: file names; `fields`: how values of other people's making are read
- `records`: manifest, head, end, owner, retired mark; `seal`; `cursor`: cursors and hints
- `row`: one line of a chunk; `batch`: many at a time; `arrays`: arrays in rows; `encoded_row`: encoded rows and packs
- `state`: what a run needs to go on, in checkpoints and cursors; `blend_state`: of several streams
- `source_facts`: what seals of the producer say of its sources
- not of the directory: `kept_sample`, a sample in the cache of a node; `indexed`, Megatron's index

The specification for other languages is `docs/format.md`.
"""
