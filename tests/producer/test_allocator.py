from __future__ import annotations

import platform

import pytest

from tests.stream.streams import python

ROUNDS = """
import resource, sys
if sys.argv[1] == "keep":
    from lazyshard_producer.run import keep_freed_memory
    keep_freed_memory()
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
rows = [bytes(2000) for _ in range(2000)]
before = faults()
for _ in range(20):
    rows = None
    rows = [bytes(2000) for _ in range(2000)]
print(faults() - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries keep what is freed by rules of theirs")
def test_pages_of_freed_rows_are_not_fetched_again() -> None:
    given_back, kept = (int(python(ROUNDS, mode).stdout) for mode in ("give back", "keep"))
    assert given_back > 1000
    assert kept < given_back / 10
