"""The files of a stream directory and the states of runs, as values: encoded, decoded, validated. No I/O, no clock.

`records` checks every field that is read; `docs/format.md` specifies the files for other languages.
"""
