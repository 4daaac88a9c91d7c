"""Streams of rows that ms-swift's template has encoded, made by the real `lazyshard-producer run --encode swift`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from tests.swift.commands import CPU
from tests.swift.streams import ROOT
from tests.swift.unit.programs import environment

SIZE: Final = 8
"""Samples of a chunk, where nobody says otherwise."""

MAX_LENGTH: Final = 512
TEMPLATE: Final = "qwen2_5"


def environment_of(folder: Path) -> dict[str, str]:
    """The environment of a process that imports ms-swift and the packages of this checkout, its files in a folder."""
    return environment(
        HOME=str(folder),
        MODELSCOPE_CACHE=str(folder / "ms"),
        HF_HUB_OFFLINE="1",
        CUDA_VISIBLE_DEVICES="",
        PYTHONPATH=os.pathsep.join(
            map(str, (CPU / "startup", ROOT, ROOT / "producer", ROOT / "integrations" / "swift"))
        ),
        OMP_NUM_THREADS="1",
    )


def produce(
    out: Path, rows: Sequence[dict[str, Any]], model: Path, *options: object, samples_per_chunk: int = SIZE
) -> subprocess.CompletedProcess[str]:
    """Makes a stream of these rows, or goes on with it."""
    source = out.parent / f"{out.name}.jsonl"
    source.write_text("".join(json.dumps(one) + "\n" for one in rows), encoding="utf-8")
    arguments = ["run", "--source", source, "--out", out, "--samples-per-chunk", samples_per_chunk, "--no-progress"]
    encoding = ["--encode", "swift", "--model", model, "--template", TEMPLATE, "--max-length", MAX_LENGTH]
    encoding += ["--encode-option", "model_type=qwen3"]
    return subprocess.run(
        [sys.executable, "-m", "lazyshard_producer", *map(str, [*arguments, *encoding, *options])],
        env=environment_of(out.parent),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
