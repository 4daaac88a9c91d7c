"""`--encode swift --split` and `--pad`: what ms-swift makes of such rows, and that it trains them."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any, Final

import pytest

from lazyshard import StreamReader
from tests.harness.processes.producing import run_arguments
from tests.swift.commands import megatron_sft
from tests.swift.encoding import MAX_LENGTH, TEMPLATE
from tests.swift.programs import found_by, offline, run
from tests.swift.streams import row

pytestmark = [pytest.mark.timeout(400)]

ROWS: Final = 60
TOKENS: Final = 96
"""More than any row has."""

FOR_PRE_TRAINING: Final = (
    *("--encode-option", "use_chat_template=false"),
    *("--encode-option", "loss_scale=all"),
    *("--encode-option", "model_type=qwen3"),
)

_PRODUCE: Final = """
import json, sys
from lazyshard_producer.cli import main
sys.exit(max(main(arguments) for arguments in json.loads(sys.argv[1])))
"""


def text(number: int) -> dict[str, Any]:
    """The answer of a row behind its number, without any chat around it."""
    question, answer = row(number)["messages"]
    return {"messages": [{"role": "assistant", "content": f"{question['content']} {answer['content']}"}]}


@pytest.fixture(scope="module")
def streams(tmp_path_factory: pytest.TempPathFactory, model: Path) -> dict[str, Path]:
    """The same rows, encoded; and cut, or padded, besides. By one process, which imports ms-swift once."""
    folder = tmp_path_factory.mktemp("sequences")
    source = folder / "rows.jsonl"
    source.write_text("".join(json.dumps(text(number)) + "\n" for number in range(ROWS)), encoding="utf-8")
    encoding = ["--encode", "swift", "--model", model, "--template", TEMPLATE, *FOR_PRE_TRAINING]
    commands = [
        run_arguments(folder / name, [source], 8, *encoding, *options, "--no-progress")
        for name, options in (
            ("encoded", ("--max-length", MAX_LENGTH)),
            ("split", ("--split", TOKENS)),
            ("padded", ("--max-length", MAX_LENGTH, "--pad", TOKENS)),
        )
    ]
    ended = run(["-c", _PRODUCE, json.dumps(commands)], offline(folder))
    assert ended.returncode == 0, ended.stderr
    return {name: folder / name for name in ("encoded", "split", "padded")}


def test_batches_are_those_of_the_documents(streams: dict[str, Path], model: Path, tmp_path: Path) -> None:
    options = [f"template={TEMPLATE}", f"max_length={MAX_LENGTH}", "model_type=qwen3", "loss_scale=all"]
    program = Path(__file__).with_name("sequences_program.py")
    result = found_by(program, tmp_path, *streams.values(), model, *options)
    assert result["apart"]
    assert result["whole"] == [True] * 4
    assert result["padded"] == [True] * (ROWS + 1)
    # Of two sequences of several documents each, none of which attends to another.
    assert len(result["lengths"]) > 4
    assert result["borders"] == [0, *itertools.accumulate(result["lengths"])]


def test_sequences_are_trained_by_megatron_pt(streams: dict[str, Path], model: Path, tmp_path: Path) -> None:
    sequences = sum(1 for _ in StreamReader(streams["split"]))
    run = megatron_sft(
        tmp_path / "run",
        model,
        command=("megatron", "pt"),
        processes=2,
        dataset=streams["split"],
        sharded_lazy=True,
        max_length=TOKENS,
        micro_batch_size=1,
        global_batch_size=4,
        num_train_epochs=1,
    )
    assert len(run.losses) == sequences // 4 >= 4
    # All are full, but for the last one of the stream.
    assert sum(batch.tokens != TOKENS for batch in run.batches) <= 1
    assert max(map(len, (batch.ids for batch in run.batches))) > 1
