"""Which sample a rank draws at a step: integers in, integers out, no files, no clock, no state.

`course` says which sample a rank (a lane) draws at a position, through any changes of the number of ranks. It takes
`segment`, what is left of an epoch at such a change, `deal`, samples to lanes, and `shuffle`, which permutes windows of
them and deals rows by cost. `blend` chooses among streams, `sequences` cuts and packs rows.
"""
