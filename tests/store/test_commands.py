"""The commands that read take a URL as they take a directory."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lazyshard import LazyShardedDataset, Order
from lazyshard.cli.main import main
from lazyshard.format.names import chunk_name, seal_name
from lazyshard.store.objects import PATIENCE_VARIABLE
from lazyshard.store.urls import UrlPath, stream_path
from lazyshard.stream import read_cursor
from tests.store.server import BUSY, Server
from tests.store.streams import publish, put
from tests.stream.streams import HERE


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str]:
    capsys.readouterr()
    code = main([str(argument) for argument in arguments])
    told = capsys.readouterr()
    return code, told.out + told.err


@pytest.fixture
def folder(tmp_path: Path, bucket: UrlPath) -> Path:
    return publish(tmp_path / "local", bucket, 25, 4)


DIFFER = r"\([0-9.]+ s, [^)]*\)|\"(seconds|looked_at_s|heartbeat_age_s|free_bytes)\":[^,}]+"
"""What is not the same at another moment, or is not known of a store."""


@pytest.mark.few(4)
@pytest.mark.parametrize(
    "arguments",
    [
        ("inspect", "{}"),
        ("inspect", "{}", "7", "--rows", "2"),
        ("inspect", "{}", "--chunk", "6"),
        ("inspect", "{}", "--json"),
        ("status", "{}", "--json"),
        ("verify", "{}"),
        ("verify", "{}", "--quick", "--json"),
    ],
    ids=" ".join,
)
@pytest.mark.few(3)
def test_it_tells_the_same(
    folder: Path, bucket: UrlPath, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...]
) -> None:
    told = []
    for stream in (folder, bucket):
        code, text = run(capsys, *(argument.format(stream) for argument in arguments))
        assert code == 0, text
        told.append(re.sub(DIFFER, "", text).replace(str(stream), "STREAM"))
    assert told[0] == told[1]


@pytest.mark.full
def test_verify_looks_at_the_store(
    folder: Path, bucket: UrlPath, capsys: pytest.CaptureFixture[str], server: Server
) -> None:
    assert len(LazyShardedDataset(bucket, dp_rank=0, dp_size=1)) == 25
    put(bucket / chunk_name(2), (folder / chunk_name(2)).read_bytes().replace(b"9", b"8"))
    put(bucket / chunk_name(3), (folder / chunk_name(3)).read_bytes()[:-3])
    bucket.store.delete(f"{bucket.key}/{seal_name(4)}")
    code, text = run(capsys, "verify", bucket)
    assert code == 5
    damaged = [f"damage: {name}" for name in (chunk_name(2), chunk_name(3), seal_name(4))]
    assert [":".join(line.split(":")[:2]) for line in text.splitlines()[:-1]] == damaged
    server.asked.clear()
    code, text = run(capsys, "verify", bucket, "--quick")
    assert code == 5
    assert chunk_name(3) in text
    assert not server.gets(".jsonl")


def test_run_is_traced_audited_and_forgotten(folder: Path, bucket: UrlPath, capsys: pytest.CaptureFixture[str]) -> None:
    order = Order(micro_batches_per_step=2, unit="batch")
    dataset = LazyShardedDataset(bucket, dp_rank=0, dp_size=1, batch_size=2, consumer="run", order=order)
    dataset.commit(8, last_epoch=True)
    assert run(capsys, "trace", bucket, "--consumer", "run", "--step", "2")[0] == 0
    code, text = run(capsys, "audit", bucket, "--consumer", "run")
    assert code == 9, text
    assert [run(capsys, "forget", bucket, "run", "--yes")[0] for _ in range(2)] == [0, 3]


@pytest.mark.parametrize("command", ["status", "inspect", "verify"])
def test_nothing_there_and_no_answer_are_told(
    server: Server, bucket: UrlPath, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    code, text = run(capsys, command, bucket)
    assert code == 5 if command != "verify" else code in (2, 5, 7)
    assert str(bucket) in text
    monkeypatch.setenv(PATIENCE_VARIABLE, "0.2")
    faults: Any = (503, BUSY)
    server.fault = lambda method, key: faults
    code, text = run(capsys, command, bucket)
    assert code == 7
    assert "Traceback" not in text


GUIDE = (HERE / "docs" / "object-storage.md").read_text(encoding="utf-8")


@pytest.mark.full
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
