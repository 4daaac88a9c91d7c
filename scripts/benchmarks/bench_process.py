"""A child process of the benchmarks, and its measurements of itself. Linux only.

    python -m scripts.benchmarks.bench_process MODULE.FUNCTION SETTINGS

calls the function with the JSON object SETTINGS as its arguments; the last line that it prints is the JSON of what it
returns. This module imports nothing but the standard library, since it runs in the environments of other packages too.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

_SESSION, _UTIME, _STIME, _CUTIME, _CSTIME = 3, 11, 12, 13, 14
"""Fields of /proc/PID/stat behind the name, which may hold anything."""

_TICKS_PER_S: Final = os.sysconf("SC_CLK_TCK")


def timed(work: Callable[[], object], count: int = 1) -> dict[str, float]:
    """Returns microseconds per item: wall time (`us`) and total CPU time (`processor us`)."""
    processor, clock = _own_processor_s(), time.perf_counter()
    work()
    seconds = time.perf_counter() - clock
    return {"us": seconds / count * 1e6, "processor us": (_own_processor_s() - processor) / count * 1e6}


def _own_processor_s() -> float:
    return time.process_time() + sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2])


def _session() -> dict[int, list[str]]:
    """Returns the processes of this session, with the fields of their stat behind the name."""
    found = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            # Some end meanwhile.
            with contextlib.suppress(OSError):
                fields = Path("/proc", entry, "stat").read_text(errors="replace").rpartition(")")[2].split()
                if int(fields[_SESSION]) == os.getsid(0):
                    found[int(entry)] = fields
    return found


def processor_s() -> float:
    """Returns the processor time of this session: of what runs, and of what has been waited for."""
    others = [fields for pid, fields in _session().items() if pid != os.getpid()]
    ticks = sum(int(fields[at]) for fields in others for at in (_UTIME, _STIME, _CUTIME, _CSTIME))
    return _own_processor_s() + ticks / _TICKS_PER_S


def memory_mb(pid: int | str = "self") -> dict[str, float]:
    """Returns MB (10^6 bytes) of a process: resident, its proportional share, and what of it is no file's."""
    found = {}
    for line in Path("/proc", str(pid), "smaps_rollup").read_text().splitlines():
        name, *rest = line.split()
        if name in ("Rss:", "Pss:", "Pss_Anon:"):
            found[name] = int(rest[0]) * 1024 / 1e6
    return {"resident": found["Rss:"], "share": found["Pss:"], "anonymous": found["Pss_Anon:"]}


def session_mb() -> float:
    """Returns the proportional shares of all processes of this session."""
    total = 0.0
    for pid in _session():
        with contextlib.suppress(OSError):
            total += memory_mb(pid)["share"]
    return total


def peak_mb() -> float:
    """Returns the peak of the resident memory since `forget_peak`."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024 / 1e6
    raise RuntimeError("/proc/self/status has no VmHWM")


def forget_peak() -> None:
    """Lets the peak be counted from here on."""
    Path("/proc/self/clear_refs").write_text("5")


def say(**found: Any) -> None:
    """Prints a line for the parent."""
    print("\n" + json.dumps(found), flush=True)


def main() -> int:
    """Does what the arguments name."""
    module, _, function = sys.argv[1].partition(".")
    found = getattr(importlib.import_module(f"scripts.benchmarks.{module}"), function)(**json.loads(sys.argv[2]))
    say(**(found or {}))
    # Some loaders leave threads and processes that take seconds to end.
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
