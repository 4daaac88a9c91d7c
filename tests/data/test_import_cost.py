"""What the first data set of a process imports: nothing that it may not need, so that a job's start costs no time."""

from __future__ import annotations

import subprocess
import sys

import pytest

OPTIONAL = (
    "filelock",
    "fsspec",
    "watchdog",
    "lazyshard.data.blended",
    "lazyshard.data.commits",
    "lazyshard.data.encode_cache",
    "lazyshard.data.iterable",
    "lazyshard.data.loading",
    "lazyshard.data.sequences",
    "lazyshard.store.mirror",
    "lazyshard.store.objects",
    "lazyshard.stream.writer",
)

MOST_MODULES = 85
"""Each costs about half a millisecond."""


def modules_after(statement: str) -> set[str]:
    program = f"import torch, sys\n{statement}\nprint(*sys.modules)"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100, check=True)
    return set(ended.stdout.split())


def test_the_package_itself_imports_only_its_errors() -> None:
    found = {name for name in modules_after("import lazyshard") if name.startswith("lazyshard.")}
    assert found == {"lazyshard.errors", "lazyshard.lazy"}


def test_a_data_set_imports_nothing_that_it_may_not_need() -> None:
    found = modules_after("import lazyshard; lazyshard.LazyShardedDataset")
    assert found.isdisjoint(OPTIONAL)
    assert sum(name.startswith("lazyshard.") for name in found) <= MOST_MODULES


@pytest.mark.full
def test_modules_of_a_package_are_attributes_of_it_as_if_it_had_imported_them() -> None:
    program = (
        "import lazyshard; lazyshard.stream.reader.StreamReader; lazyshard.data.StreamingShard; "
        "assert callable(lazyshard.streaming_shard) and callable(lazyshard.data.streaming_shard)"
    )
    modules_after(program)
