"""`lazyshard export` in processes of its own; what it writes: tests/conversion/test_exporting."""

import json
import re
import signal
from pathlib import Path
from typing import Final

import pytest

from lazyshard.cli.main import main
from tests.cli.commands import lazyshard, python
from tests.conversion import megatron_core
from tests.conversion.megatron_core import content
from tests.conversion.test_exporting import ids, stream
from tests.stream.streams import names

pytestmark = [pytest.mark.full, pytest.mark.usefixtures("megatron")]


@pytest.fixture
def megatron() -> None:
    megatron_core.module()


ROWS: Final = ids([1, 2], [3], [4, 5, 6])


def test_export_and_export_again(tmp_path: Path) -> None:
    source, prefix = stream(tmp_path / "s", ROWS), tmp_path / "a"
    done = lazyshard("export", source, prefix)
    assert (done.returncode, done.stderr) == (0, "")
    holds = f"{prefix}.bin and .idx hold 3 documents, 3 sequences, 6 tokens of uint16; 114 bytes"
    assert re.fullmatch(rf"exported: {re.escape(holds)} \(\d+\.\d s\)\n", done.stdout)
    done = lazyshard("export", source, prefix)
    assert (done.returncode, done.stdout, f"{prefix}.bin" in done.stderr) == (3, "", True)
    done = lazyshard("export", source, prefix, "--force", "--dtype", "int32", "--json")
    counts = {"samples": 3, "documents": 3, "sequences": 3, "tokens": 6, "size": 126}
    files = {"data": f"{prefix}.bin", "index": f"{prefix}.idx", "dtype": "int32"}
    assert (done.returncode, json.loads(done.stdout)) == (0, files | counts)


STOPPED: Final = """
import os, signal, sys
from lazyshard.cli import export

# Of a shell that has started the tests in the background it may come ignored.
signal.signal(signal.SIGINT, signal.default_int_handler)

read_row, left = export.read_row, [0] * 5

def stopped(*arguments):
    if not left:
        os.kill(os.getpid(), int(sys.argv[3]))
    left and left.pop()
    return read_row(*arguments)

export.read_row = stopped
from lazyshard.cli.main import main
sys.exit(main(["export", sys.argv[1], sys.argv[2]]))
"""


@pytest.mark.parametrize(("by", "code"), [(signal.SIGKILL, -signal.SIGKILL), (signal.SIGINT, 130)])
def test_stopped_half_way_and_run_again(by: signal.Signals, code: int, tmp_path: Path) -> None:
    rows = ids(*([number] for number in range(10)))
    source, prefix = stream(tmp_path / "s", rows), tmp_path / "a"
    assert python("-c", STOPPED, source, prefix, int(by)).returncode == code
    left = [name for name in names(tmp_path) if name != "s"]
    # Of a killed one its own file is left, under a name that no other export takes.
    assert [bool(re.fullmatch(r"\.a\.bin\.[0-9a-f]{16}", name)) for name in left] == [True] * (code < 0)
    assert main(["export", str(source), str(prefix)]) == 0
    assert content(prefix).sequences == [row["input_ids"] for row in rows]
    assert names(tmp_path) == [*left, "a.bin", "a.idx", "s"]
