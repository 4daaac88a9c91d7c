"""Which sample a rank draws at a step: integers in, integers out, no files, no clock, no state.

`deal` gives samples to lanes, `shuffle` permutes windows of them, `segment` is what is left of an epoch when the number
of lanes changes, `course` a whole run; `layout` gives indices, `steps` the steps of a trainer and the end of an epoch;
`blend` chooses among streams, `balance` deals by cost, `splitting` and `sequences` cut and pack rows.
"""
