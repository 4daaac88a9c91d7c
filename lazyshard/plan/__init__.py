"""Computes which sample a rank draws at a step, from integers alone: no files, no clock, no state.

`course` returns the sample that a rank (a lane) draws at a position, through any changes of the number of ranks. It is
built on `segment`, the rest of an epoch after such a change, `deal`, which maps samples to lanes, and `shuffle`, which
permutes windows of them. `balance` deals rows by cost, `blend` selects among streams, `sequences` cuts and packs rows.
"""
