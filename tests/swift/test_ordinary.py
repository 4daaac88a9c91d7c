"""The baseline: ordinary data and ms-swift's own samplers, nothing of lazyshard; what the harness tells of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import pytest

from tests.swift.commands import swift_sft
from tests.swift.streams import write_jsonl

SAMPLES: Final = 24
GLOBAL_BATCH: Final = 8

# Of the runs, at one time with others on 2 cores.
pytestmark = [pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_jsonl(tmp_path_factory.mktemp("ordinary") / "rows.jsonl", 0, SAMPLES)


def test_swift_is_the_same_as_without_the_hook(tmp_path: Path, model: Path, data: Path) -> None:
    options: dict[str, Any] = {"processes": 1, "dataset": data, "num_train_epochs": 1, "save_strategy": "epoch"}
    hooked = swift_sft(tmp_path / "hooked", model, **options)
    # Python runs this after the .pth files: what lazyshard_swift.pth has put there is taken away again.
    site = tmp_path / "site" / "sitecustomize.py"
    site.parent.mkdir()
    site.write_text(
        "import sys\n"
        "found = [finder for finder in sys.meta_path if getattr(finder, 'lazyshard_swift', False)]\n"
        "for finder in found:\n"
        "    sys.meta_path.remove(finder)\n"
        "print('unhooked', len(found), flush=True)\n"
    )
    bare = swift_sft(tmp_path / "bare", model, environment={"PYTHONPATH": str(site.parent)}, **options)
    assert "unhooked 1" in bare.output
    assert [batch.ids for batch in hooked.batches] == [batch.ids for batch in bare.batches]
    assert hooked.losses == bare.losses
    ours, theirs = (
        {str(path.relative_to(run.output_dir)) for path in run.output_dir.rglob("*.json")} for run in (hooked, bare)
    )
    assert ours == theirs
    arguments = [json.loads((run.output_dir / "args.json").read_bytes()) for run in (hooked, bare)]
    added = {name: value for name, value in arguments[0].items() if name not in arguments[1]}
    assert added["sharded_lazy"] is False and all(name.startswith("sharded_lazy") for name in added)
    elsewhere = {name for name, value in arguments[1].items() if arguments[0][name] != value}
    assert elsewhere <= {"output_dir", "logging_dir", "training_args", "run_name"}, (
        "arguments that are not as they were"
    )
