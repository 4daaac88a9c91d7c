"""`lazyshard measure` by ms-swift's template and by a tokenizer: the lengths that ms-swift and transformers find."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import pytest

from lazyshard import ChunkWriter
from lazyshard.cli import exits
from lazyshard.cli.main import main
from lazyshard.storage.token_lengths import chunk_tokens
from tests.storage.test_token_lengths import lengths_of
from tests.swift.unit.programs import python

MAX_LENGTH: Final = 75

WORDS: Final = ("the answer is three", "hello world", "what is the sum of one and two", "chunk row rank")

EXPECTED: Final = """
import json, sys
from swift import get_processor, get_template
from swift.template import MaxLengthError
from transformers import AutoTokenizer

template = get_template(get_processor(sys.argv[1], model_type="qwen3"), template_type="qwen2_5", max_length=75)
template.set_mode("train")
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])

def length(row):
    try:
        return len(template.encode(row)["input_ids"])
    except MaxLengthError:
        return 0

rows = json.loads(sys.argv[2])
found = {
    "template": [length({"messages": row["messages"]}) for row in rows],
    "tokenizer": [len(tokenizer(row["note"])["input_ids"]) for row in rows],
}
print()
print(json.dumps(found))
"""


@pytest.fixture
def rows() -> list[dict[str, Any]]:
    texts = [" ".join(WORDS[(number + part) % 4] for part in range(number % 8)) for number in range(10)]
    return [
        {
            "messages": [{"role": "user", "content": WORDS[number % 4]}, {"role": "assistant", "content": text or "0"}],
            "note": text,
        }
        for number, text in enumerate(texts)
    ]


def test_lengths_are_those_of_the_template_and_of_the_tokenizer(
    rows: list[dict[str, Any]], model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with ChunkWriter(tmp_path / "s", 4) as writer:
        for row in rows:
            writer.write(row)
    done = python(EXPECTED, model, json.dumps(rows))
    assert done.returncode == 0, done.stderr
    expected = json.loads(done.stdout.splitlines()[-1])
    assert 0 in expected["template"] and len(set(expected["template"])) > 3
    common = ["measure", str(tmp_path / "s"), "--workers", "1"]
    by_model = [
        "--model",
        str(model),
        "--model-type",
        "qwen3",
        "--template",
        "qwen2_5",
        "--max-length",
        str(MAX_LENGTH),
    ]
    assert main([*common, *by_model]) == exits.DONE
    assert lengths_of(tmp_path / "s") == expected["template"]
    text = chunk_tokens(tmp_path / "s", 0).measure
    assert text is not None
    assert text.startswith("template qwen2_5, max_length 75, tokenizer ")
    told = capfd.readouterr()
    assert "make no sample and count 0" in told.err
    assert told.out.startswith(f"{tmp_path / 's'}: measured 10 rows in 3 chunks")

    assert main([*common, "--tokenizer", str(model), "--field", "note"]) == exits.REFUSED
    assert main([*common, "--tokenizer", str(model), "--field", "note", "--replace"]) == exits.DONE
    assert lengths_of(tmp_path / "s") == expected["tokenizer"]


def test_model_that_ms_swift_does_not_know_is_refused(
    model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with ChunkWriter(tmp_path / "s", 4) as writer:
        writer.write({"id": 0})
    arguments = [
        "measure",
        str(tmp_path / "s"),
        "--model",
        str(model),
        "--model-type",
        "qwen3",
        "--template",
        "nothing",
    ]
    assert main(arguments) == exits.REFUSED
    assert f"{model}: ms-swift has no template for it: " in capfd.readouterr().err
