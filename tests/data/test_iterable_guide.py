"""The program of `docs/iterable.md`, on two ranks while the stream grows: what it prints is what the page says."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

from lazyshard import ChunkWriter
from tests.data.streams import expected, in_batches
from tests.data.workers import DEADLINE_S
from tests.stream.streams import HERE

GUIDE = (HERE / "docs" / "iterable.md").read_text(encoding="utf-8")


def test_two_ranks_print_what_the_page_says(tmp_path: Path) -> None:
    program = re.findall(r"^```python\n(.*?)^```", GUIDE, re.MULTILINE | re.DOTALL)[0]
    printed = re.findall(r"^```text\n(.*?)^```", GUIDE, re.MULTILINE | re.DOTALL)
    environment = os.environ | {"PYTHONPATH": str(HERE)}
    with ChunkWriter(tmp_path / "stream", 3) as writer, ExitStack() as ends:
        for number in range(12):
            writer.write({"id": number})
        ranks = []
        for rank in (0, 1):
            command = [sys.executable, "-u", "-c", program, str(rank)]
            process = subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True)
            ranks.append(ends.enter_context(process))
            ends.callback(process.kill)
        for rank, process in enumerate(ranks):
            # It trains before the stream has ended.
            assert process.stdout is not None
            assert process.stdout.readline() == printed[rank].splitlines(keepends=True)[0]
        for number in range(12, 17):
            writer.write({"id": number})
        writer.close()
        rest = [process.communicate(timeout=DEADLINE_S)[0] for process in ranks]
    assert [process.returncode for process in ranks] == [0, 0]
    assert rest == [text.partition("\n")[2] for text in printed]


def test_last_micro_batches_are_as_it_says() -> None:
    (pad,) = re.findall(r"the ranks drew `([\d ]+)` and `([\d ]+)`", GUIDE.replace("\n", " "))
    found = [in_batches(lane, 4)[-1] for lane in expected(17, 2, 4, unit=3, at_end="pad")]
    assert [list(map(int, text.split())) for text in pad] == found
