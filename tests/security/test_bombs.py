"""Little files that expand to much: memory stays bounded by --max-row-bytes, whatever they hold."""

from __future__ import annotations

import gzip
import io
import tracemalloc
from pathlib import Path
from typing import Final

import pytest

from lazyshard_producer.sources.decompression import BLOCK_BYTES, open_text
from tests.security.hostile import producer

EXPANDED_BYTES: Final = 64 << 20
MAX_ROW_BYTES: Final = 100_000


def bomb(head: bytes = b"") -> bytes:
    """One member of gzip: some 64 KiB that are 64 MiB of zeros."""
    return gzip.compress(head + bytes(EXPANDED_BYTES), compresslevel=6)


@pytest.mark.parametrize("name", ["bomb.jsonl.gz", "nested.jsonl.gz"])
def test_run_over_a_bomb_ends_with_an_error_in_bounded_memory(
    name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    data = bomb(b'{"id":0}\n{"text":"')
    (tmp_path / name).write_bytes(data if name.startswith("bomb") else gzip.compress(data))
    run = ("run", "--source", tmp_path / name, "--out", tmp_path / "out", "--samples-per-chunk", 1)
    (tmp_path / "little.jsonl.gz").write_bytes(gzip.compress(b'{"id":0}\n'))
    assert producer("run", "--source", tmp_path / "little.jsonl.gz", "--out", tmp_path / "o", *run[-2:]) == 0  # imports
    tracemalloc.start()
    try:
        assert producer(*run, "--max-row-bytes", MAX_ROW_BYTES) == 3
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < EXPANDED_BYTES // 3
    assert "Traceback" not in capfd.readouterr().err


def test_text_of_a_bomb_comes_in_blocks() -> None:
    text = open_text(io.BufferedReader(io.BytesIO(bomb())), "bomb.gz")
    sizes = []
    while block := text.read():
        sizes.append(len(block))
    assert sum(sizes) == EXPANDED_BYTES
    assert max(sizes) <= 2 * BLOCK_BYTES
