"""The commands that read take a URL as they take a directory."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from lazyshard import LazyShardedDataset, Order
from lazyshard.cli.main import main
from lazyshard.format.names import chunk_name, seal_name
from lazyshard.store.objects import PATIENCE_VARIABLE
from lazyshard.store.urls import UrlPath
from tests.store.server import BUSY, Server
from tests.store.streams import publish, put


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str]:
    capsys.readouterr()
    code = main([str(argument) for argument in arguments])
    told = capsys.readouterr()
    return code, told.out + told.err


@pytest.fixture
def folder(tmp_path: Path, bucket: UrlPath) -> Path:
    return publish(tmp_path / "local", bucket, 25, 4)


@pytest.mark.parametrize(
    "arguments",
    [
        ("inspect", "{}"),
        ("inspect", "{}", "7", "--rows", "2"),
        ("inspect", "{}", "--chunk", "6"),
        ("verify", "{}"),
        ("verify", "{}", "--quick", "--json"),
    ],
    ids=" ".join,
)
def test_it_tells_what_it_tells_of_a_directory(
    folder: Path, bucket: UrlPath, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...]
) -> None:
    told = []
    for stream in (folder, bucket):
        code, text = run(capsys, *(argument.format(stream) for argument in arguments))
        assert code == 0, text
        # How long it took.
        text = re.sub(r"\([0-9.]+ s, [^)]*\)|\"seconds\": [^,}]+", "", text)
        told.append(text.replace(str(stream), "STREAM"))
    assert told[0] == told[1]


@pytest.mark.parametrize(
    ("arguments", "differing"),
    [
        (("status",), ("directory", "looked_at_s", "free_bytes")),
        (("inspect",), ()),
    ],
)
def test_json_of_a_bucket_is_that_of_a_directory(
    folder: Path,
    bucket: UrlPath,
    capsys: pytest.CaptureFixture[str],
    arguments: tuple[str, ...],
    differing: tuple[str, ...],
) -> None:
    told = []
    for stream in (folder, bucket):
        code, text = run(capsys, arguments[0], stream, "--json", *arguments[1:])
        assert code == 0, text
        values = json.loads(text.replace(str(stream), "STREAM"))
        values.get("producer", {}).pop("heartbeat_age_s", None)
        told.append({name: value for name, value in values.items() if name not in differing})
    assert told[0] == told[1]
    assert len(told[0]) > 3


def test_verify_finds_damage_in_the_store_whatever_was_copied(
    folder: Path, bucket: UrlPath, capsys: pytest.CaptureFixture[str], server: Server
) -> None:
    assert len(LazyShardedDataset(bucket, dp_rank=0, dp_size=1)) == 25
    put(bucket / chunk_name(2), (folder / chunk_name(2)).read_bytes().replace(b"9", b"8"))
    put(bucket / chunk_name(3), (folder / chunk_name(3)).read_bytes()[:-3])
    path = bucket / seal_name(4)
    assert isinstance(path, UrlPath)
    path.store.delete(path.key)
    code, text = run(capsys, "verify", bucket)
    assert code == 5
    assert [line.split(":")[:2] for line in text.splitlines()[:-1]] == [
        ["damage", f" {chunk_name(2)}"],
        ["damage", f" {chunk_name(3)}"],
        ["damage", f" {seal_name(4)}"],
    ]
    server.asked.clear()
    code, text = run(capsys, "verify", bucket, "--quick")
    assert code == 5
    assert chunk_name(3) in text
    assert not server.gets(".jsonl")


def test_forget_takes_the_cursor_away(folder: Path, bucket: UrlPath, capsys: pytest.CaptureFixture[str]) -> None:
    dataset = LazyShardedDataset(bucket, dp_rank=0, dp_size=1, consumer="run")
    dataset.commit(0, last_epoch=True)
    code, text = run(capsys, "forget", bucket, "run", "--yes")
    assert (code, text.splitlines()[-1]) == (0, "forgotten: run")
    assert run(capsys, "forget", bucket, "run", "--yes")[0] == 3


def test_a_run_is_traced_and_audited(folder: Path, bucket: UrlPath, capsys: pytest.CaptureFixture[str]) -> None:
    dataset = LazyShardedDataset(
        bucket, dp_rank=0, dp_size=1, batch_size=2, consumer="run", order=Order(micro_batches_per_step=2, unit="batch")
    )
    dataset.commit(8, last_epoch=True)
    assert run(capsys, "trace", bucket, "--consumer", "run", "--step", "2")[0] == 0
    code, text = run(capsys, "audit", bucket, "--consumer", "run")
    assert code == 9, text


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
    assert "failed for" in text
    assert "Traceback" not in text
