"""The checker of configurations: all mistakes at once, each with its path, line and what is meant."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from lazyshard import check_config
from lazyshard.config import read_config
from lazyshard.config.config import Config
from lazyshard.errors import ConfigInvalid

GOOD: dict[str, Any] = {"version": 1, "datasets": [{"path": "chat"}]}
NAMED = "tests.data.step_functions"


def write(folder: Path, text: str) -> Path:
    file = folder / "train.yaml"
    file.write_text(text, encoding="utf-8")
    return file


def places(folder: Path, text: str) -> list[tuple[str, int | None]]:
    return [(mistake.path, mistake.line) for mistake in check_config(write(folder, text))]


def test_every_value_of_a_good_file_is_read(tmp_path: Path) -> None:
    text = f"""
version: 1
tokenizer: {{path: "{tmp_path}", max_length: 4096, too_long: truncate}}
datasets:
  - path: chat
    weight: 0.8
    steps: &steps
      - filter_fn: {NAMED}:even
      - map: {{function: "{NAMED}:add_index", with_indices: true, remove_columns: [id, ""]}}
      - message_transform: {NAMED}:to_messages
    max_error_count: 3
  - path: code
    weight: 2
    steps: *steps
    max_error_count: null
    unit: 5
    shuffle_window: 4
    max_total_samples: 100
    samples_per_chunk: 10
    cache_bytes: 1000
dataloader:
  form: map
  batch_size: 8
  num_workers: 2
  collate_fn: {NAMED}:encode
  pin_memory: false
  prefetch_factor: 3
  persistent_workers: true
  multiprocessing_context: spawn
num_samples: 1000
stopping: all_exhausted
micro_batches_per_step: 4
seed: 7
max_wait: 12.5
consumer: run
"""
    config = read_config(write(tmp_path, text)).config
    assert config is not None
    found = config.model_dump(exclude_defaults=True)
    code, chat = found["datasets"][1], found["datasets"][0]
    assert chat["steps"] == code["steps"]
    assert chat["steps"] == (
        {"filter_fn": {"function": f"{NAMED}:even"}},
        {"map": {"function": f"{NAMED}:add_index", "with_indices": True, "remove_columns": ("id", "")}},
        {"message_transform": {"function": f"{NAMED}:to_messages"}},
    )
    assert (chat["path"], chat["weight"], chat["max_error_count"]) == ("chat", 0.8, 3)
    del code["steps"]
    assert code == {
        "path": "code",
        "weight": 2.0,
        "max_error_count": None,
        "unit": 5,
        "shuffle_window": 4,
        "max_total_samples": 100,
        "samples_per_chunk": 10,
        "cache_bytes": 1000,
    }
    loader = {"form": "map", "batch_size": 8, "num_workers": 2, "collate_fn": f"{NAMED}:encode", "prefetch_factor": 3}
    assert found["dataloader"] == loader | {"persistent_workers": True, "multiprocessing_context": "spawn"}
    assert found["tokenizer"] == {"path": str(tmp_path), "max_length": 4096, "too_long": "truncate"}
    del found["datasets"], found["dataloader"], found["tokenizer"], found["version"]
    top = {"num_samples": 1000, "stopping": "all_exhausted", "micro_batches_per_step": 4, "seed": 7}
    assert found == top | {"max_wait": 12.5, "consumer": "run"}


def test_all_mistakes_are_named_at_once_in_the_order_of_the_file(tmp_path: Path) -> None:
    text = f"""version: 1
tokenizer:
  path: {tmp_path}/nowhere
  max_length: 0
datasets:
  - pth: chat
    weight: -1
    steps:
      - filter_fn: my_rows.keep
      - map: {{function: "{NAMED}:add_squre", with_indexes: true}}
      - filter: {NAMED}:even
      - {{}}
      - {{filter_fn: "{NAMED}:even", map: "{NAMED}:add_square"}}
      - {NAMED}:even
  - path: code
    wieght: 0.2
    unit: chunks
    max_error_count: -1
dataloader:
  num_workers: two
  at_end: never
  drop_last: true
  batch_size: 8
  batch_size: 4
  pin_memory: 1
seeed: 1
max_wait: .inf
"""
    assert places(tmp_path, text) == [
        ("tokenizer.path", 3),
        ("tokenizer.max_length", 4),
        ("datasets[0].path", 6),
        ("datasets[0].pth", 6),
        ("datasets[0].weight", 7),
        ("datasets[0].steps[0].filter_fn", 9),
        ("datasets[0].steps[1].map.function", 10),
        ("datasets[0].steps[1].map.with_indexes", 10),
        ("datasets[0].steps[2].filter", 11),
        ("datasets[0].steps[3]", 12),
        ("datasets[0].steps[4]", 13),
        ("datasets[0].steps[5]", 14),
        ("datasets[1].wieght", 16),
        ("datasets[1].unit", 17),
        ("datasets[1].max_error_count", 18),
        ("dataloader.num_workers", 20),
        ("dataloader.at_end", 21),
        ("dataloader.drop_last", 22),
        ("dataloader.batch_size", 24),
        ("dataloader.pin_memory", 25),
        ("seeed", 26),
        ("max_wait", 27),
    ]
    texts = {mistake.path: mistake.text for mistake in check_config(tmp_path / "train.yaml")}
    assert "is weight meant?" in texts["datasets[1].wieght"]
    assert "is dataloader.at_end meant?" in texts["dataloader.drop_last"]
    assert "is add_square meant?" in texts["datasets[0].steps[1].map.function"]
    assert all(known in texts["datasets[1].unit"] for known in ("chunk", "sample", "batch", "auto", "integer"))


@pytest.mark.parametrize(
    ("change", "path"),
    [
        ({"version": 2}, "version"),
        ({"version": "1"}, "version"),
        ({"version": True}, "version"),
        ({"version": None}, "version"),
        ({"datasets": []}, "datasets"),
        ({"datasets": {"path": "a"}}, "datasets"),
        ({"datasets": [{"path": "a"}, {"path": "./a"}]}, "datasets"),
        ({"datasets": ["a"]}, "datasets[0]"),
        ({"datasets": [{"path": ""}]}, "datasets[0].path"),
        ({"datasets": [{"path": "a", "weight": True}]}, "datasets[0].weight"),
        (
            {"datasets": [{"path": "a", "steps": [{"map": {}}]}]},
            "datasets[0].steps[0].map.function",
        ),
        ({"datasets": [{"path": "a", "steps": [{"filter_fn": bool, "map": None}]}]}, "datasets[0].steps[0]"),
        ({"datasets": [{"path": "a", "steps": [{"filter_fn": None}]}]}, "datasets[0].steps[0].filter_fn"),
        ({"tokenizer": "dir"}, "tokenizer"),
        ({"dataloader": []}, "dataloader"),
        ({"dataloader": {"prefetch_factor": 2}}, "dataloader.prefetch_factor"),
        ({"dataloader": {"persistent_workers": True}}, "dataloader.persistent_workers"),
        ({"dataloader": {"form": "map", "at_end": "pad"}}, "dataloader.at_end"),
        ({"dataloader": {"at_end": "pad"}, "num_samples": 8}, "dataloader"),
        ({"dataloader": {"at_end": "loop"}, "datasets": [{"path": "a"}, {"path": "b"}]}, "dataloader"),
        ({3: 4}, "3"),
    ],
    ids=str,
)
def test_mistake_in_a_dict_is_named_by_its_path(change: dict[Any, Any], path: str) -> None:
    assert [(mistake.path, mistake.line) for mistake in check_config(GOOD | change)] == [(path, None)]


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"batch_size": 8}, "known are version, tokenizer, datasets, "),
        ({"drop_last": True}, "known are version, "),
        ({"dataloader": {"seed": 8}}, "known are form, at_end, "),
        ({"dataloader": {"drop-last": True}}, "is dataloader.at_end meant?"),
        ({"dataloader": {"Batch-Size": 8}}, "is batch_size meant?"),
        ({"datasets": [{"path": "a", "steps": [{"weight": 1}]}]}, "known are message_transform, filter_fn, map"),
        (
            {"datasets": [{"path": "a", "steps": [{"message_transform": {"function": bool, "remove_columns": []}}]}]},
            "known are function",
        ),
    ],
    ids=str,
)
def test_unknown_key_is_answered_with_keys_of_its_section(change: dict[str, Any], text: str) -> None:
    (mistake,) = check_config(GOOD | change)
    assert mistake.text.startswith(f"unknown key; {text}")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", [("", None)]),
        ("- 1\n", [("", 1)]),
        ("version: 1\n", [("datasets", 1)]),
        ("a: [1\nb: 2\n", [("", 2)]),
        (
            "version: 1\ndatasets:\n  - path: a\nconsumer: !!python/object:os.x 3\nmax_wait: -1\n",
            [("consumer", 4), ("max_wait", 5)],
        ),
        ("version: 1\ndatasets:\n  - path: a\nconsumer: 2020-99-99\n", [("consumer", 4)]),
        ("version: 1\ndatasets: &a\n  - path: a\n  - *a\n", [("datasets[1]", 2)]),
        ("[" * 100_000, [("", 1)]),
        ("a: [\n" * 100_000, [("", 101)]),
        ("- " * 100_000, [("", None)]),
        (
            "version: 1\ndatasets:\n  - &chat {path: chat, seed: 1}\n  - {<<: *chat, path: code}\n",
            [("datasets[0].seed", 3), ("datasets[1].seed", 3)],
        ),
    ],
    ids=range(11),
)
def test_what_is_no_configuration_is_said_so(tmp_path: Path, text: str, expected: list[tuple[str, int | None]]) -> None:
    assert places(tmp_path, text) == expected


def test_aliases_that_stand_for_too_much_are_refused(tmp_path: Path) -> None:
    lines = ["a0: &a0 [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 9)]
    (mistake,) = check_config(write(tmp_path, "\n".join(lines)))
    assert "more than 10000 entries" in mistake.text


def test_what_is_too_large_or_no_text_or_holds_itself_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "train.yaml"
    for data in (b"#" * ((1 << 20) + 1), b"version: \xff"):
        file.write_bytes(data)
        (mistake,) = check_config(file)
        assert (mistake.path, mistake.line) == ("", None)
    config: dict[str, Any] = {**GOOD}
    config["datasets"] = [config]
    assert len(check_config(config)) == 1


def test_functions_and_paths_themselves_may_stand_in_a_dict(tmp_path: Path) -> None:
    config = {"version": 1, "datasets": [{"path": tmp_path, "steps": [{"filter_fn": bool}]}]}
    checked = read_config(config).config
    assert checked is not None
    (step,) = checked.datasets[0].steps
    assert checked.datasets[0].path == str(tmp_path)
    assert step.filter_fn is not None
    assert step.filter_fn.function is bool


def test_nothing_is_imported_where_that_is_not_wanted(tmp_path: Path) -> None:
    (tmp_path / "raises_when_imported.py").write_text("raise SystemExit(3)\n")
    config = GOOD | {"datasets": [{"path": "a", "steps": [{"filter_fn": "raises_when_imported:f"}]}]}
    assert check_config(config, imports=False) == []
    assert "raises_when_imported" not in sys.modules


def test_error_of_load_has_a_line_for_each_mistake(tmp_path: Path) -> None:
    file = write(tmp_path, "version: 1\nseed: -1\nstoping: 1\n")
    with pytest.raises(ConfigInvalid) as caught:
        read_config(file)
    head, *lines = str(caught.value).splitlines()
    assert head == f"{file}: 3 mistakes"
    assert lines == [f"  {mistake}" for mistake in check_config(file)]
    assert (caught.value.file, caught.value.count) == (str(file), 3)


@pytest.mark.parametrize("package", ["yaml", "pydantic"])
def test_missing_package_is_said_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ImportError, match=r"pip install 'lazyshard\[config\]'"):
        check_config(write(tmp_path, "version: 1\n"))
    if package == "yaml":
        assert check_config(GOOD) == []


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


@pytest.mark.parametrize("version", ["", "version: 0"])
def test_version_0_means_what_version_1_says(tmp_path: Path, version: str) -> None:
    old = read_config(write(tmp_path, version + OLD))
    new = read_config(write(tmp_path, NEW))
    assert old.config == new.config
    assert new.notice is None
    assert old.notice is not None


def test_single_data_set_of_version_0_needs_no_list() -> None:
    expected = Config.model_validate(GOOD | {"dataloader": {"at_end": "loop"}})
    assert read_config({"dataset": {"source": "chat"}, "drop_last": False}).config == expected


def test_mistakes_in_version_0_are_named_where_they_stand(tmp_path: Path) -> None:
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
    assert places(tmp_path, text) == [
        ("dataset[0].weight", 4),
        ("dataset[0].filter_fn", 5),
        ("dataset[0].wieght", 6),
        ("dataset[1].source", 7),
        ("batch_size", 8),
        ("drop_last", 9),
        ("batchsize", 10),
        ("datasets", 11),
    ]


@pytest.mark.parametrize("drop", ["pad", "drop", 1, None])
def test_drop_last_of_version_0_is_true_or_false(drop: Any) -> None:
    (mistake,) = check_config({"dataset": {"source": "chat"}, "drop_last": drop})
    assert (mistake.path, mistake.text) == ("drop_last", f"expected true or false, found {drop!r}")


@pytest.mark.parametrize(
    "config", [{"version": 1, "dataset": []}, {"version": 0}, {"version": 0, "dataset": 3}, {"dataset": [3]}], ids=str
)
def test_what_is_of_no_version_is_refused(config: dict[str, Any]) -> None:
    assert check_config(config)
