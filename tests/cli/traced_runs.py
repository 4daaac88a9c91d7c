"""Small streams and the checkpoints of runs over them, for the tests of `lazyshard trace` and `lazyshard audit`."""

import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from lazyshard import ChunkWriter
from lazyshard.format.state import Cursor, RunState
from lazyshard.part import Part
from lazyshard.stream import write_cursor


def make_stream(directory: Path, samples: int = 24, *, end: bool = True) -> str:
    writer = ChunkWriter(directory, 3)
    for number in range(samples):
        writer.write({"id": number, "text": f"row {number}"})
    writer.close(end)
    return str(json.loads((directory / "stream.json").read_bytes())["stream_id"])


def run_of(stream_id: str | None, *parts: Part, **settings: Any) -> RunState:
    consumed = sum(part.dp * part.draws for part in parts if part.trained)
    values: dict[str, Any] = {"samples_per_chunk": 3, "unit": 3, "window": 0, "seed": 0, "max_total_samples": None}
    return RunState(stream_id, parts=parts, consumed=consumed, **(values | settings))


def two_ranks(steps: int) -> Part:
    """A part of two ranks, two samples of each in a step."""
    return Part(2, 1, 2 * steps, draws_per_step=2)


def save(folder: Path, step: int, state: RunState, **values: Any) -> Path:
    """Writes a checkpoint as ms-swift's is; those saved later are of later steps unless told otherwise."""
    checkpoint = folder / f"checkpoint-{step}"
    checkpoint.mkdir(parents=True)
    content = {"step": step, "consumed": state.consumed, "consumer": "sft", "saved_at": 100.0 + step} | values
    (checkpoint / "lazyshard.json").write_text(json.dumps(content | {"state": state.to_dict()}))
    return checkpoint


def commit(directory: Path, state: RunState | None, chunks_before: int = 0, **values: Any) -> None:
    fields: dict[str, Any] = {"consumer": "sft", "consumed": 0 if state is None else state.consumed} | values
    stream_id = json.loads((directory / "stream.json").read_bytes())["stream_id"]
    write_cursor(
        directory,
        Cursor(stream_id=stream_id, chunks_before=chunks_before, plan={}, updated_at=1.0, state=state, **fields),
    )


def changed(state: RunState, part: int, **fields: Any) -> RunState:
    parts = list(state.parts)
    parts[part] = replace(parts[part], **fields)
    return with_parts(state, parts)


def with_parts(state: RunState, parts: Iterable[Part]) -> RunState:
    parts = tuple(parts)
    return replace(state, parts=parts, consumed=sum(part.dp * part.draws for part in parts if part.trained))
