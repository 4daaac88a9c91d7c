"""A line that is far too long: refused with --max-row-bytes named, and never held in memory, in every kind of source.

Measured is the peak memory of the whole command. A row of a --transform, of a generator or of a table is made by the
user's code or library, so it is in memory before anybody can look at its length; only that it is refused is tested:
test_bad_input_functions, test_generator, test_arrow_values. A gigabyte: test_compressed, test_follow.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from tests.harness.processes.environment import DEADLINE_S, environment
from tests.harness.processes.producing import ids, refused, rows, run_arguments
from tests.producer.fault_sources import KINDS, TextSource

LONG: Final = 96 << 20
MOST: Final = 1 << 20

PROGRAM: Final = """
import sys
from lazyshard_producer.cli import main

code = main(sys.argv[1:])
peak = next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(code, int(peak) << 10)
"""


def run_measured(source: TextSource, out: Path, *more: object) -> tuple[int, int, str]:
    """Returns the exit code, the peak memory in bytes and what is said."""
    arguments = [*run_arguments(out, [], 4), *source.arguments, "--max-row-bytes", str(MOST), *map(str, more)]
    command = [sys.executable, "-W", "ignore", "-c", PROGRAM, *arguments]
    with source.given():
        done = subprocess.run(
            command, env=environment(), capture_output=True, text=True, timeout=DEADLINE_S, check=True
        )
    code, peak = map(int, done.stdout.split())
    return code, peak, done.stderr


@pytest.mark.parametrize("kind", KINDS)
def test_a_line_that_is_too_long_takes_no_memory(kind: str, tmp_path: Path) -> None:
    if kind == "zstd":
        pytest.importorskip("zstandard")
    peaks = []
    for size in (2 * MOST, LONG):
        folder = tmp_path / str(size)
        folder.mkdir()
        source, out = TextSource(kind, folder), folder / "out"
        source.write(rows(0, 5) + b'{"id":"%s"}\n' % (b"x" * size) + rows(5, 9))

        code, peak, said = run_measured(source, out, "--on-bad-row", "quarantine")
        assert code == 0, said
        assert "refused_rows=1\n" in said
        assert ids(out) == list(range(9))
        (entry,) = refused(out)
        assert entry == {
            "at": entry["at"],
            "source": source.name,
            "line": 6,
            "byte": len(rows(0, 5)),
            "reason": "longer than the 1048576 bytes of --max-row-bytes",
            "row": "",
        }
        peaks.append(peak)
    # Blocks that are in hand or read ahead, of a few MiB; the line is 96 MiB.
    assert peaks[1] - peaks[0] < 32 << 20
