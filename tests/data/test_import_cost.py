"""What the first data set of a process imports: nothing that it may not need, so that a job's start costs no time."""

from __future__ import annotations

from pathlib import Path

from tests.data.programs import run_program

LATER = ["data.blend_state", "data.blended", "data.commits", "data.encode_cache", "data.iterable", "data.loading"]
LATER += ["data.sequences", "plan.blend", "store.mirror", "store.objects", "stream.writer"]
OPTIONAL = {"filelock", "fsspec", "watchdog", *(f"lazyshard.{name}" for name in LATER)}

MOST_MODULES = 85  # Each costs about half a millisecond


def modules_after(statement: str, folder: Path) -> set[str]:
    """What is imported by then in a process that has imported torch."""
    ended = run_program(f"import sys\n{statement}\nprint(*sys.modules)", folder=folder)
    assert ended.returncode == 0, ended.stderr
    return set(ended.stdout.split())


def test_a_data_set_imports_nothing_that_it_may_not_need(tmp_path: Path) -> None:
    found = {name for name in modules_after("import lazyshard", tmp_path) if name.startswith("lazyshard.")}
    assert found == {"lazyshard.errors", "lazyshard.lazy"}
    found = modules_after("import lazyshard; lazyshard.LazyShardedDataset", tmp_path)
    assert found.isdisjoint(OPTIONAL)
    assert sum(name.startswith("lazyshard.") for name in found) <= MOST_MODULES
