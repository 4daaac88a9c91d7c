"""The checker of configurations: all mistakes at once, each with its path, line and what is meant."""

from __future__ import annotations

import builtins
import sys
from pathlib import Path
from typing import Any

import pytest

from lazyshard import check_config
from lazyshard.config import Mistake, read_config
from lazyshard.config.config import Config, DatasetConfig, LoaderConfig, StepConfig, TokenizerConfig
from lazyshard.errors import ConfigInvalid

GOOD: dict[str, Any] = {"version": 1, "datasets": [{"path": "chat"}]}
NAMED = "tests.data.step_functions"


def write(folder: Path, text: str) -> Path:
    file = folder / "train.yaml"
    file.write_text(text, encoding="utf-8")
    return file


def found(folder: Path, text: str) -> list[str]:
    return [str(mistake) for mistake in check_config(write(folder, text))]


def test_every_value_of_a_good_file_is_read(tmp_path: Path) -> None:
    text = f"""
version: 1
tokenizer: {{path: "{tmp_path}", max_length: 4096, too_long: truncate}}
datasets:
  - path: chat
    weight: 0.8
    steps: &steps
      - filter_fn: {NAMED}:even
      - map: {{function: "{NAMED}:add_index", with_indices: true, remove_columns: [id]}}
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
    steps = (
        StepConfig("filter_fn", f"{NAMED}:even", False, ()),
        StepConfig("map", f"{NAMED}:add_index", True, ("id",)),
        StepConfig("message_transform", f"{NAMED}:to_messages", False, ()),
    )
    checked = read_config(write(tmp_path, text))
    assert checked.notice is None
    assert checked.config == Config(
        tokenizer=TokenizerConfig(str(tmp_path), 4096, "truncate"),
        datasets=(
            DatasetConfig("chat", 0.8, steps, 3, "chunk", 0, None, None, 0),
            DatasetConfig("code", 2, steps, None, 5, 4, 100, 10, 1000),
        ),
        dataloader=LoaderConfig("map", "drop", 8, 2, f"{NAMED}:encode", False, 3, True, "spawn"),
        num_samples=1000,
        stopping="all_exhausted",
        micro_batches_per_step=4,
        seed=7,
        max_wait=12.5,
        consumer="run",
    )


def test_least_of_a_configuration_and_its_defaults() -> None:
    config = read_config(GOOD).config
    assert config is not None
    assert config.datasets == (DatasetConfig("chat", 1.0, (), 100, "chunk", 0, None, None, 0),)
    assert config.dataloader == LoaderConfig("stream", "drop", 1, 0, None, False, None, False, None)
    assert (config.tokenizer, config.num_samples, config.seed, config.max_wait) == (None, None, 0, 600.0)


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
  - path: ./code
dataloader:
  batch_size: 8
  num_workers: two
  at_end: loop
  drop_last: true
  batch_size: 4
  pin_memory: 1
seeed: 1
max_wait: .inf
"""
    assert found(tmp_path, text) == [
        f"tokenizer.path (line 3): there is no directory '{tmp_path}/nowhere', seen from {Path.cwd()}",
        "tokenizer.max_length (line 4): expected an integer from 1, found 0",
        "datasets[0].path (line 6): missing; expected the directory of a stream",
        "datasets[0].pth (line 6): unknown key; is path meant?",
        "datasets[0].weight (line 7): expected a number above 0, found -1",
        'datasets[0].steps[0].filter_fn (line 9): my_rows.keep: expected "package.module:function"',
        f"datasets[0].steps[1].map.function (line 10): {NAMED}:add_squre: {NAMED} has no add_squre; is add_square "
        f"meant?",
        "datasets[0].steps[1].map.with_indexes (line 10): unknown key; is with_indices meant?",
        "datasets[0].steps[2].filter (line 11): unknown key; is filter_fn meant?",
        "datasets[0].steps[3] (line 12): expected one of message_transform, filter_fn, map, found nothing",
        "datasets[0].steps[4] (line 13): expected one of message_transform, filter_fn, map, found filter_fn and map",
        f"datasets[0].steps[5] (line 14): expected a mapping such as filter_fn: my_rows:keep, found '{NAMED}:even'",
        "datasets[1].wieght (line 16): unknown key; is weight meant?",
        "datasets[1].unit (line 17): expected one of chunk, sample, batch, auto, or an integer from 1, found 'chunks'",
        "datasets[1].max_error_count (line 18): expected an integer from 0, found -1",
        "datasets[2].path (line 19): the stream of datasets[1] once more; give it once, with the sum of the weights",
        "dataloader.num_workers (line 22): expected an integer from 0, found 'two'",
        "dataloader.at_end (line 23): expected drop, found loop: several data sets end by `stopping` or `num_samples`",
        "dataloader.drop_last (line 24): unknown key; is dataloader.at_end meant?",
        "dataloader.batch_size (line 25): given twice, first on line 21; take one of them out",
        "dataloader.pin_memory (line 26): expected true or false, found 1",
        "seeed (line 27): unknown key; is seed meant?",
        "max_wait (line 28): expected a number above 0, found inf",
    ]


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"version": 2}, "version: this lazyshard reads versions 0 and 1, found 2, which a later one reads: install "),
        ({"version": "1"}, "version: expected 1, found '1'"),
        ({"version": True}, "version: expected 1, found true"),
        ({"version": None}, "version: expected 1, found nothing"),
        ({"datasets": []}, "datasets: expected at least one data set, found an empty list"),
        ({"datasets": {"path": "a"}}, "datasets: expected a list, each entry a mapping with the path: of a stream, fo"),
        ({"datasets": ["a"]}, "datasets[0]: expected a mapping with the path: of a stream, found 'a'"),
        ({"datasets": [{"path": ""}]}, "datasets[0].path: expected the directory of a stream, found ''"),
        ({"datasets": [{"path": "a", "weight": True}]}, "datasets[0].weight: expected a number above 0, found true"),
        ({"tokenizer": "dir"}, "tokenizer: expected a mapping, found 'dir'"),
        ({"dataloader": []}, "dataloader: expected a mapping, found a list"),
        ({"dataloader": {"form": "iterable"}}, "dataloader.form: expected one of stream, map, found 'iterable'"),
        ({"dataloader": {"prefetch_factor": 2}}, "dataloader.prefetch_factor: of worker processes, and num_workers i"),
        ({"dataloader": {"form": "map", "at_end": "pad"}}, "dataloader.at_end: expected drop, found pad: with `form: "),
        ({"dataloader": {"at_end": "pad"}, "num_samples": 8}, "dataloader.at_end: expected drop, found pad: with `num"),
        ({"num_samples": 0}, "num_samples: expected an integer from 1, found 0"),
        ({"stopping": "first"}, "stopping: expected one of first_exhausted, all_exhausted, found 'first'"),
        ({3: 4}, "3: expected a name as the key, found 3"),
        ({"x": 1}, "x: unknown key; known are version, datasets, tokenizer, dataloader, num_samples, stopping, micro_"),
    ],
    ids=str,
)
def test_mistake_in_a_dict_is_named_by_its_path(change: dict[Any, Any], expected: str) -> None:
    (mistake,) = check_config(GOOD | change)
    assert mistake.line is None
    assert str(mistake).startswith(expected)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", ["it is empty; `version: 1` and `datasets:` are needed"]),
        ("- 1\n", ["line 1: expected a mapping, found a list"]),
        ("version: 1\n", ["datasets (line 1): missing; expected a list, each entry a mapping with the path: of a "
          "stream"]),
        ("datasets:\n  - path: a\n", ["version (line 1): missing; expected 1"]),
        ("a: [1\nb: 2\n", ["line 2: no YAML: expected ',' or ']', but got ':'"]),
        ("version: 1\ndatasets:\n  - path: a\nseed: !!python/object:os.x 3\nmax_wait: -1\n",
         ["seed (line 4): expected a plain value: could not determine a constructor for the tag "
          "'tag:yaml.org,2002:python/object:os.x'",
          "max_wait (line 5): expected a number above 0, found -1"]),
        ("version: 1\ndatasets:\n  - path: a\nconsumer: 2020-99-99\n",
         ["consumer (line 4): expected a plain value: month must be in 1..12"]),
        ("version: 1\ndatasets: &a\n  - path: a\n  - *a\n", ["datasets[1] (line 2): it holds itself, by an alias"]),
        ("[" * 100_000, ["line 1: no YAML: more than 100 brackets within each other"]),
        ("a: [\n" * 100_000, ["line 101: no YAML: more than 100 brackets within each other"]),
        ("- " * 100_000, ["it is nested too deeply"]),
    ],
    ids=range(11),
)  # fmt: skip
def test_what_is_no_configuration_is_said_so(tmp_path: Path, text: str, expected: list[str]) -> None:
    assert found(tmp_path, text) == expected


def test_merge_keys_are_read_as_yaml_has_them(tmp_path: Path) -> None:
    text = """
version: 1
datasets:
  - &chat {path: chat, weight: 2, seed: 1}
  - {<<: *chat, path: code, weight: 3}
"""
    assert found(tmp_path, text) == [
        "datasets[0].seed (line 4): unknown key; known are steps, path, weight, unit, shuffle_window, "
        "max_total_samples, samples_per_chunk, cache_bytes, max_error_count",
        "datasets[1].seed (line 4): unknown key; known are steps, path, weight, unit, shuffle_window, "
        "max_total_samples, samples_per_chunk, cache_bytes, max_error_count",
    ]


def test_aliases_that_stand_for_too_much_are_refused(tmp_path: Path) -> None:
    lines = ["a0: &a0 [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 9)]
    assert any("more than 10000 entries; do aliases" in text for text in found(tmp_path, "\n".join(lines)))


def test_file_that_is_too_large_or_no_text_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "train.yaml"
    file.write_bytes(b"#" * ((1 << 20) + 1))
    assert check_config(file) == [Mistake("", None, "larger than 1048576 bytes, which no configuration is")]
    file.write_bytes(b"version: \xff")
    (mistake,) = check_config(file)
    assert mistake.text.startswith("no UTF-8: ")


def test_dict_that_holds_itself_is_refused() -> None:
    config: dict[str, Any] = {**GOOD}
    config["datasets"] = [config]
    assert any("holds itself" in str(mistake) or "more than" in str(mistake) for mistake in check_config(config))


def test_functions_and_paths_themselves_may_stand_in_a_dict(tmp_path: Path) -> None:
    config = {"version": 1, "datasets": [{"path": tmp_path, "steps": [{"filter_fn": bool}]}]}
    checked = read_config(config).config
    assert checked is not None
    assert checked.datasets[0].path == str(tmp_path)
    assert checked.datasets[0].steps[0].function is bool


def test_nothing_is_imported_where_that_is_not_wanted(tmp_path: Path) -> None:
    (tmp_path / "raises_when_imported.py").write_text("raise SystemExit(3)\n")
    config = GOOD | {"datasets": [{"path": "a", "steps": [{"filter_fn": "raises_when_imported:f"}]}]}
    assert check_config(config, imports=False) == []
    assert "raises_when_imported" not in sys.modules


def test_error_of_load_has_a_line_for_each_mistake(tmp_path: Path) -> None:
    file = write(tmp_path, "version: 1\nseed: -1\nstoping: 1\n")
    with pytest.raises(ConfigInvalid) as caught:
        read_config(file)
    assert str(caught.value).splitlines() == [
        f"{file}: 3 mistakes",
        "  datasets (line 1): missing; expected a list, each entry a mapping with the path: of a stream",
        "  seed (line 2): expected an integer from 0, found -1",
        "  stoping (line 3): unknown key; is stopping meant?",
    ]
    assert (caught.value.file, caught.value.count) == (str(file), 3)


def test_missing_yaml_is_said_so_and_dicts_need_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def refuse(name: str, *arguments: Any) -> Any:
        if name == "yaml":
            raise ModuleNotFoundError("No module named 'yaml'", name="yaml")
        return real(name, *arguments)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(ImportError, match=r"needs PyYAML: pip install 'lazyshard\[config\]'"):
        check_config(write(tmp_path, "version: 1\n"))
    assert check_config(GOOD) == []
