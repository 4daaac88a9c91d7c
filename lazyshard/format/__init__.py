"""The files of a stream directory, and the states of runs, as values: encode, decode, validate. No I/O, no clock.

`fields` reads values of other people's making; `docs/format.md` specifies the files for other languages.
"""
