"""CPU cost of a sample in training: encoded on the fly, from an encoded stream, from a cache; large arrays.

- Chat rows of 2 KB, encoded with ms-swift's own template, in batches of 8: processor time of the process, reading
  included. All ways make the same samples, which is checked. Loading is what is not in the encoder: reading, digest,
  parsing and index, beside an encoder that fills the processor's caches with its own.
- Rows with 1 MiB of float32, in batches of 8, looked at in each page: processor time of a fresh process for each
  reader, in its own environment. The floor reads the same bytes with one `preadv` a row into new memory. What all of
  them read is compared by a digest.
"""

from __future__ import annotations

import functools
import importlib.util
import itertools
from collections.abc import Iterator, Mapping
from typing import Any, Final

from scripts.benchmarks.bench_data import make_stream
from scripts.benchmarks.bench_harness import Benchmark, Failed, Figures, Missing, Row, Setting, Side, child

_ONE_THREAD: Final = {"OMP_NUM_THREADS": "1"}
"""As in a worker beside others."""

PACKAGES: Final = {
    "bytes": "",
    "bytes-again": "",
    "lazyshard": "",
    "litdata": "litdata",
    "mosaicml-streaming": "mosaicml-streaming",
    "datasets": "datasets",
    "arrow": "datasets",
    "arrow-mapped": "datasets",
}
"""The readers of arrays, and the package that each needs."""

_FILES: Final = {"bytes-again": "bytes", "arrow-mapped": "arrow"}
"""Readers that read the files of another one."""

_UNIT: Final = "processor us"


def prepare(setting: Setting) -> Mapping[str, Side]:
    """Returns the sides."""
    place, rows = setting.place, setting.size(2_000, 200)

    @functools.cache
    def passes() -> dict[str, Iterator[float]]:
        # One process for all rounds, as importing ms-swift takes long; it returns the results one after another.
        settings = {"stream": str(make_stream(place / "raw", rows)), "place": str(place), "rounds": setting.rounds}
        found = child("bench_encode_process.passes", settings, place, **_ONE_THREAD)
        return {name: itertools.cycle(values) for name, values in found.items()}

    def passing(name: str) -> Side:
        def turn() -> Figures:
            if importlib.util.find_spec("swift") is None:
                raise Missing("ms-swift is not installed; scripts/environment full installs it")
            return {_UNIT: next(passes()[name])}

        return turn

    @functools.cache
    def written(files: str) -> str:
        _arrays("write", files, PACKAGES[files], place=str(place / files))
        return str(place / files)

    def _arrays(function: str, name: str, package: str, **settings: Any) -> dict[str, Any]:
        python = setting.python(package) if package else ""
        return child(f"bench_arrays.{function}", {"name": name, **settings}, place, python, **_ONE_THREAD)

    digests: set[str] = set()

    def reading(name: str) -> Side:
        def turn() -> Figures:
            found = _arrays("read", name, PACKAGES[name], place=written(_FILES.get(name, name)))
            digests.add(found.pop("digest"))
            if len(digests) > 1:
                raise Failed(f"{name} has read other arrays than were written")
            return found

        return turn

    ways = ("on the fly", "of that loading", "encoded", "cached")
    return {name: passing(name) for name in ways} | {name: reading(name) for name in PACKAGES}


ENCODE: Final = Benchmark(
    "encode",
    "a sample that is encoded already, against encoding it; out of a cache; rows with arrays of 1 MiB",
    (
        Row("encoded", "encoded", "on the fly", _UNIT, 20.0),
        Row("cached", "cached", "encoded", _UNIT, 1 / 1.2),
        Row("loading", "of that loading", "on the fly", _UNIT, 20.0),
        Row("arrays", "lazyshard", "bytes", _UNIT, 0.8),
        Row("arrays.bytes-again", "lazyshard", "bytes-again", _UNIT),
        Row("arrays.litdata", "lazyshard", "litdata", _UNIT, 1.0),
        Row("arrays.mosaicml-streaming", "lazyshard", "mosaicml-streaming", _UNIT, 1.0),
        Row("arrays.datasets", "lazyshard", "datasets", _UNIT, 1.0),
        Row("arrays.arrow", "lazyshard", "arrow", _UNIT),
        Row("arrays.arrow-mapped", "lazyshard", "arrow-mapped", _UNIT),
    ),
    prepare,
)
