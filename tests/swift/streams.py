"""Numbered rows for trainings, as ordinary files, as streams, and as a stream that is still being produced."""

import json
import random
import subprocess
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from tests.harness.processes.producing import head, run_arguments, running
from tests.stream.streams import publish_rows

WORDS: Final = ("the", "quick", "brown", "fox", "jumps", "over", "lazy", "dog", "what", "is", "sum", "of", "one", "and")
PRODUCER_DEADLINE_S: Final = 60.0


def row(number: int) -> dict[str, Any]:
    """Row `number`: names itself once, in the user's turn, and has 65 to 125 tokens, the same ones every time."""
    words = random.Random(number)
    question = " ".join(words.choice(WORDS) for _ in range(words.randint(1, 24)))
    answer = " ".join(words.choice(WORDS) for _ in range(words.randint(2, 24)))
    user = {"role": "user", "content": f"sample {number:05d} {question}"}
    return {"messages": [user, {"role": "assistant", "content": answer}]}


def text(number: int) -> dict[str, Any]:
    """The same in one answer, without any chat around it."""
    question, answer = row(number)["messages"]
    return {"messages": [{"role": "assistant", "content": f"{question['content']} {answer['content']}"}]}


def write_rows(path: Path, rows: Iterable[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(one) + "\n" for one in rows), encoding="utf-8")
    return path


def write_jsonl(path: Path, first: int, last: int) -> Path:
    """Rows `first` up to, not including, `last`. Returns the path."""
    return write_rows(path, map(row, range(first, last)))


def write_stream(directory: Path, first: int, last: int, samples_per_chunk: int, *, end: bool = True) -> Path:
    """The same rows as a stream, ended unless `end` is False (an unfinished chunk is then not published)."""
    return publish_rows(directory, samples_per_chunk, map(row, range(first, last)), end=end)


@contextmanager
def producing(
    directory: Path, source: Path, samples_per_chunk: int, rate: float, *arguments: object
) -> "Iterator[subprocess.Popen[str]]":
    """The real `lazyshard-producer run`, in a process of its own, publishing `source` at `rate` rows a second.

    Leaving the block waits for a producer that is finishing by itself, and kills it after a minute.
    """
    command = run_arguments(directory, [source], samples_per_chunk, "--no-progress", "--rate", rate, *arguments)
    with running(*command) as process:
        yield process
        process.communicate(timeout=PRODUCER_DEADLINE_S)


def published(directory: Path) -> int:
    samples: int = head(directory).get("samples", 0)
    return samples
