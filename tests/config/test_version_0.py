"""The flat form of configurations, version 0: read as version 1, with a notice; mistakes keep their places."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lazyshard.config import check_config, read_config

NAMED = "tests.data.step_functions"

OLD = f"""
tokenizer: {{path: .}}
dataset:
  - source: chat
    weight: 0.8
    message_transform: {NAMED}:to_messages
    filter_fn: {NAMED}:even
  - source: code
    weight: 0.2
    shuffle_window: 2
batch_size: 8
num_workers: 2
drop_last: true
seed: 7
num_samples: 100
"""

NEW = f"""
version: 1
tokenizer: {{path: .}}
datasets:
  - path: chat
    weight: 0.8
    steps:
      - filter_fn: {NAMED}:even
      - message_transform: {NAMED}:to_messages
  - path: code
    weight: 0.2
    shuffle_window: 2
dataloader: {{batch_size: 8, num_workers: 2, at_end: drop}}
seed: 7
num_samples: 100
"""


def write(folder: Path, text: str) -> Path:
    file = folder / "train.yaml"
    file.write_text(text, encoding="utf-8")
    return file


@pytest.mark.parametrize("version", ["", "version: 0"])
def test_older_form_means_what_the_new_one_says(tmp_path: Path, version: str) -> None:
    old = read_config(write(tmp_path, version + OLD))
    new = read_config(write(tmp_path, NEW))
    assert old.config == new.config
    assert new.notice is None
    assert old.notice is not None
    assert "the flat form of version 0, which later releases will not read any more" in old.notice


def test_single_data_set_needs_no_list() -> None:
    config = read_config({"dataset": {"source": "chat"}, "drop_last": False}).config
    assert config is not None
    assert [dataset.path for dataset in config.datasets] == ["chat"]
    assert config.dataloader.at_end == "loop"


def test_mistakes_are_named_where_they_stand(tmp_path: Path) -> None:
    text = """
dataset:
  - source: chat
    weight: 0
    filter_fn: my_rows.keep
    wieght: 1
  - weight: 1
batch_size: no
drop_last: 1
batchsize: 4
datasets: []
"""
    assert [str(mistake) for mistake in check_config(write(tmp_path, text))] == [
        "dataset[0].weight (line 4): expected a number above 0, found 0",
        'dataset[0].filter_fn (line 5): my_rows.keep: expected "package.module:function"',
        "dataset[0].wieght (line 6): unknown key; is weight meant?",
        "dataset[1].path (line 7): missing; expected the directory of a stream",
        "batch_size (line 8): expected an integer from 1, found false",
        "drop_last (line 9): expected true or false, found 1",
        "batchsize (line 10): unknown key; is batch_size meant?",
        "datasets (line 11): unknown key; is dataset meant?",
    ]


@pytest.mark.parametrize(
    "config", [{"version": 1, "dataset": []}, {"version": 0}, {"version": 0, "dataset": 3}, {"dataset": [3]}], ids=str
)
def test_what_is_of_no_version_is_refused(config: dict[str, Any]) -> None:
    assert check_config(config)
