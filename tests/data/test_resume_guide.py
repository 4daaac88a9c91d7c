"""The state that `docs/resume.md` shows is that of a run."""

from __future__ import annotations

import json
import re
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from lazyshard import ChunkWriter
from tests.data.runs import open_ranks
from tests.stream.streams import HERE

pytestmark = [pytest.mark.full, pytest.mark.timeout(300)]

GUIDE = (HERE / "docs" / "resume.md").read_text(encoding="utf-8")
ROWS = 96


def block(language: str, within: str) -> str:
    """Returns the first block of that language which has a text in it."""
    blocks: list[str] = re.findall(rf"^```{language}\n(.*?)^```", GUIDE, re.MULTILINE | re.DOTALL)
    return next(block for block in blocks if within in block)


def test_state_is_as_it_is_shown(tmp_path: Path) -> None:
    with ChunkWriter(tmp_path / "s", 8) as writer:
        for number in range(ROWS):
            writer.write({"id": number})
    shown: dict[str, Any] = json.loads(block("json", "stream_id"))
    dataset = open_ranks(tmp_path / "s", 2, batch_size=4, shuffle_window=1)[0]
    batches = dataset.batches(collate_fn=list)
    assert len([*islice(batches, 3)]) == 3
    state = batches.state_dict()
    assert shown | {"stream_id": dataset.stream_id} == state
    assert list(shown) == list(state)
