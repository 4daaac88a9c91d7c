"""Streams of rows that ms-swift's template has encoded, made by the real `lazyshard-producer run --encode swift`."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from tests.swift.programs import offline, run

SIZE: Final = 8
"""Samples of a chunk, where nobody says otherwise."""

MAX_LENGTH: Final = 512
TEMPLATE: Final = "qwen2_5"


def produce(
    out: Path, rows: Sequence[dict[str, Any]], model: Path, *options: object, samples_per_chunk: int = SIZE
) -> subprocess.CompletedProcess[str]:
    """Makes a stream of these rows, or goes on with it."""
    source = out.parent / f"{out.name}.jsonl"
    source.write_text("".join(json.dumps(one) + "\n" for one in rows), encoding="utf-8")
    arguments: list[object] = [
        "run",
        "--source",
        source,
        "--out",
        out,
        "--samples-per-chunk",
        samples_per_chunk,
        "--no-progress",
    ]
    encoding: list[object] = ["--encode", "swift", "--model", model, "--template", TEMPLATE, "--max-length", MAX_LENGTH]
    encoding += ["--encode-option", "model_type=qwen3"]
    return run(["-m", "lazyshard_producer", *arguments, *encoding, *options], offline(out.parent))
