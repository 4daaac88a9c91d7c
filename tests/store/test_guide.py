"""The program of `docs/object-storage.md`: what it prints is what the page says."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from lazyshard.store.urls import UrlPath, stream_path
from lazyshard.stream import read_cursor
from tests.store.server import Server
from tests.store.streams import publish
from tests.stream.streams import HERE

pytestmark = pytest.mark.full

GUIDE = (HERE / "docs" / "object-storage.md").read_text(encoding="utf-8")


def test_the_program_prints_what_the_page_says(tmp_path: Path, server: Server) -> None:
    *_, program = re.findall(r"^```python\n(.*?)^```", GUIDE, re.MULTILINE | re.DOTALL)
    (printed,) = re.findall(r"^```text\n(.*?)^```", GUIDE, re.MULTILINE | re.DOTALL)
    url = stream_path("s3://training/chat")
    assert isinstance(url, UrlPath)
    server.make_bucket("training")
    publish(tmp_path / "local", url, 1000, 50)
    (tmp_path / "train.py").write_text(program, encoding="utf-8")
    done = subprocess.run([sys.executable, "train.py"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, printed, "")
    cursor = read_cursor(url, "sft")
    assert cursor is not None
    assert (cursor.consumed, cursor.chunks_before) == (1000, 20)
