"""`lazyshard measure` by ms-swift's template and by a tokenizer: what their templates and texts come to, by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import pytest
from tokenizers import Tokenizer

from lazyshard import ChunkWriter
from lazyshard.cli import exits
from lazyshard.cli.main import main
from lazyshard.stream.token_lengths import chunk_tokens
from tests.stream.lengths import lengths_of

MAX_LENGTH: Final = 79

WORDS: Final = ("the answer is three", "hello world", "what is the sum of one and two", "chunk row rank")

CHAT: Final = (
    "<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant.<|im_end|>\n"
    "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n{}<|im_end|>\n"
)
"""What ms-swift's template qwen2_5 makes of a question and its answer."""

# ms-swift is imported in the process that measures, which takes its time on a machine with other work.
pytestmark = pytest.mark.timeout(300)


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
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))

    def tokens(text: str) -> int:
        return len(tokenizer.encode(text).ids)

    chats = [tokens(CHAT.format(*(message["content"] for message in row["messages"]))) for row in rows]
    assert min(chats) < MAX_LENGTH < max(chats)
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
    assert lengths_of(tmp_path / "s") == [length if length <= MAX_LENGTH else 0 for length in chats]
    text = chunk_tokens(tmp_path / "s", 0).measure
    assert text is not None
    assert text.startswith("template qwen2_5, max_length 79, tokenizer ")
    told = capfd.readouterr()
    assert "make no sample and count 0" in told.err
    assert told.out.startswith(f"{tmp_path / 's'}: measured 10 rows in 3 chunks")

    assert main([*common, "--tokenizer", str(model), "--field", "note"]) == exits.REFUSED
    assert main([*common, "--tokenizer", str(model), "--field", "note", "--replace"]) == exits.DONE
    assert lengths_of(tmp_path / "s") == [tokens(row["note"]) for row in rows]


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
