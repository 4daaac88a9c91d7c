"""`--measure` by ms-swift's template and by a tokenizer: what their templates and texts come to, by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import pytest
from tokenizers import Tokenizer

from lazyshard import ChunkWriter, StreamReader
from tests.producer.commands import run
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


def test_lengths_are_those_of_the_template_and_of_the_tokenizer(model: Path, tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = []
    for number in range(10):
        text = " ".join(WORDS[(number + part) % 4] for part in range(number % 8))
        messages = [{"role": "user", "content": WORDS[number % 4]}, {"role": "assistant", "content": text or "0"}]
        rows.append({"messages": messages, "note": text})
    with ChunkWriter(tmp_path / "s", 4) as writer:
        for row in rows:
            writer.write(row)
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))

    def tokens(text: str) -> int:
        return len(tokenizer.encode(text).ids)

    chats = [tokens(CHAT.format(*(message["content"] for message in row["messages"]))) for row in rows]
    assert min(chats) < MAX_LENGTH < max(chats)
    common = ["run", "--source", str(tmp_path / "s"), "--samples-per-chunk", "3", "--on-bad-row", "quarantine"]
    by_model = ["--model", str(model), "--template", "qwen2_5", "--max-length", str(MAX_LENGTH)]
    out = tmp_path / "template"
    swift = ["--measure", "swift", *by_model, "--encode-option", "model_type=qwen3", "--workers", "1"]
    done = run(*common, "--out", str(out), *swift)
    assert done.returncode == 0, done.stderr
    assert list(StreamReader(out)) == [row for row, length in zip(rows, chats, strict=True) if length <= MAX_LENGTH]
    assert lengths_of(out) == [length for length in chats if length <= MAX_LENGTH]
    refused = (out / "quarantine.jsonl").read_bytes().splitlines()
    assert len(refused) == sum(length > MAX_LENGTH for length in chats)

    out = tmp_path / "tokenizer"
    by_text = ["--measure", str(model), "--measure-field", "note", "--workers", "1"]
    done = run(*common, "--out", str(out), *by_text)
    assert done.returncode == 0, done.stderr
    assert lengths_of(out) == [tokens(row["note"]) for row in rows]
