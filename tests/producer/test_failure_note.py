"""Why a run has failed can be read where the stream is, by those who do not see its log."""

import json
from pathlib import Path

import pytest

from lazyshard_producer.cli import main
from tests.cli.commands import lazyshard
from tests.producer.commands import rows, run_arguments


def test_a_run_that_has_failed_says_why_in_the_stream(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, out = tmp_path / "a.jsonl", tmp_path / "out"
    source.write_bytes(rows(0, 5) + b"[]\n")
    assert main(run_arguments(out, [source], 2)) == 3
    reason = capsys.readouterr().err.splitlines()[-1].removeprefix("lazyshard-producer: error: ")
    head = json.loads((out / "head.json").read_bytes())
    assert (head["state"], head["chunks"], head["note"]) == ("failed", 2, reason)
    assert reason.startswith(f"{source}:6: ")
    producer = json.loads(lazyshard("status", out, "--json").stdout)["producer"]
    assert (producer["failure"], producer["waits_for"]) == (reason, None)
    source.write_bytes(rows(0, 6))
    assert main(run_arguments(out, [source], 2)) == 0
    assert "note" not in json.loads((out / "head.json").read_bytes())
