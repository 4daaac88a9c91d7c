"""The checker of configurations: all mistakes at once, each with its path, line and what is meant."""

import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from lazyshard import check_config
from lazyshard.config import read_config
from lazyshard.lazy import FunctionMissing, named_function
from tests.stream.streams import raised, refusal_of

GOOD: dict[str, Any] = {"version": 1, "datasets": [{"path": "chat"}]}
NAMED = "tests.data.workers"


def write(folder: Path, text: str) -> Path:
    file = folder / "train.yaml"
    file.write_text(text, encoding="utf-8")
    return file


def places(folder: Path, text: str) -> list[tuple[str, int | None]]:
    return [(mistake.path, mistake.line) for mistake in check_config(write(folder, text))]


def test_every_value_of_a_good_file_is_read(tmp_path: Path) -> None:
    even, messages = f"{NAMED}:even", f"{NAMED}:to_messages"
    mapped = {"function": f"{NAMED}:add_index", "with_indices": True}
    kwargs = {"column_map": {"a": "b"}, "masking_strategy": "train_on_all"}
    # As they are written and as they are read; the last two as torchtune writes them.
    steps: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({"filter_fn": even}, {"filter_fn": {"function": even}}),
        ({"map": mapped | {"remove_columns": ["id", ""]}}, {"map": mapped | {"remove_columns": ("id", "")}}),
        ({"message_transform": messages}, {"message_transform": {"function": messages}}),
        (
            {"filter_fn": {"function": even, "kwargs": {"by": 2}}},
            {"filter_fn": {"function": even, "kwargs": {"by": 2}}},
        ),
        ({"filter_fn": even, "filter_kwargs": {"by": 3}}, {"filter_fn": {"function": even, "kwargs": {"by": 3}}}),
        ({"message_transform": messages, **kwargs}, {"message_transform": {"function": messages, "kwargs": kwargs}}),
    ]
    written_steps, read_steps = zip(*steps, strict=True)
    chat = {"path": "chat", "weight": 0.8, "max_error_count": 3}
    code = {"path": "code", "weight": 2.0, "max_error_count": None, "unit": 5, "shuffle_window": 4}
    code |= {"max_total_samples": 100, "samples_per_chunk": 10, "cache_bytes": 1000}
    rest = {"num_samples": 1000, "stopping": "all_exhausted", "micro_batches_per_step": 4, "seed": 7, "max_wait": 12.5}
    rest |= {"consumer": "run", "tokenizer": {"path": str(tmp_path), "max_length": 4096, "too_long": "truncate"}}
    loader: dict[str, Any] = {"form": "map", "batch_size": 8, "num_workers": 2, "collate_fn": f"{NAMED}:encode"}
    loader |= {"prefetch_factor": 3, "persistent_workers": True, "multiprocessing_context": "spawn"}
    rest["dataloader"] = loader
    written = {"version": 1, "datasets": [{**one, "steps": list(written_steps)} for one in (chat, code)], **rest}
    written["dataloader"] = loader | {"pin_memory": False}
    config = read_config(write(tmp_path, yaml.safe_dump(written))).config
    assert config is not None
    found = config.model_dump(exclude_defaults=True)
    assert [dict(one) for one in found.pop("datasets")] == [{**one, "steps": read_steps} for one in (chat, code)]
    assert found.pop("version") == 1
    assert found == rest


def marked(text: str) -> list[tuple[str, int | None]]:
    """The mistakes that the comments of a file name, each with the line."""
    lines = [line.partition("  # ")[2].split() for line in text.splitlines()]
    return [(path, number) for number, paths in enumerate(lines, 1) for path in paths]


def test_all_mistakes_are_named_at_once_in_the_order_of_the_file(tmp_path: Path) -> None:
    text = f"""version: 1
tokenizer:
  path: {tmp_path}/nowhere  # tokenizer.path
  max_length: 0  # tokenizer.max_length
datasets:
  - pth: chat  # datasets[0].path datasets[0].pth
    weight: -1  # datasets[0].weight
    steps:
      - filter_fn: my_rows.keep  # datasets[0].steps[0].filter_fn
      - map:
          function: {NAMED}:add_squre  # datasets[0].steps[1].map.function
          with_indexes: true  # datasets[0].steps[1].map.with_indexes
      - filter: {NAMED}:even  # datasets[0].steps[2].filter
      - {{}}  # datasets[0].steps[3]
      - {{filter_fn: "{NAMED}:even", map: "{NAMED}:add_square"}}  # datasets[0].steps[4]
      - {NAMED}:even  # datasets[0].steps[5]
  - path: code
    wieght: 0.2  # datasets[1].wieght
    unit: chunks  # datasets[1].unit
    max_error_count: -1  # datasets[1].max_error_count
dataloader:
  num_workers: two  # dataloader.num_workers
  at_end: never  # dataloader.at_end
  drop_last: true  # dataloader.drop_last
  batch_size: 8
  batch_size: 4  # dataloader.batch_size
  pin_memory: 1  # dataloader.pin_memory
seeed: 1  # seeed
max_wait: .inf  # max_wait
"""
    assert places(tmp_path, text) == marked(text)
    texts = {mistake.path: mistake.text for mistake in check_config(tmp_path / "train.yaml")}
    assert "did you mean weight?" in texts["datasets[1].wieght"]
    assert "did you mean dataloader.at_end?" in texts["dataloader.drop_last"]
    assert "did you mean add_square?" in texts["datasets[0].steps[1].map.function"]


def dataset(**changes: Any) -> dict[str, Any]:
    return {"datasets": [{"path": "a", **changes}]}


@pytest.mark.parametrize(
    ("path", "changes"),
    [
        ("version", [{"version": version} for version in (2, "1", True, None)]),
        ("datasets", [{"datasets": given} for given in ([], {"path": "a"}, [{"path": "a"}, {"path": "./a"}])]),
        ("datasets[0]", [{"datasets": ["a"]}]),
        ("datasets[0].path", [dataset(path="")]),
        ("datasets[0].weight", [dataset(weight=True)]),
        ("datasets[0].steps[0].map.function", [dataset(steps=[{"map": {}}])]),
        ("datasets[0].steps[0]", [dataset(steps=[{"filter_fn": bool, "map": None}])]),
        ("datasets[0].steps[0].filter_fn", [dataset(steps=[{"filter_fn": None}])]),
        ("tokenizer", [{"tokenizer": "dir"}]),
        ("dataloader.prefetch_factor", [{"dataloader": {"prefetch_factor": 2}}]),
        ("dataloader.persistent_workers", [{"dataloader": {"persistent_workers": True}}]),
        ("dataloader.at_end", [{"dataloader": {"form": "map", "at_end": "pad"}}]),
        ("dataloader", [{"dataloader": []}, {"dataloader": {"at_end": "pad"}, "num_samples": 8}]),
        ("dataloader", [{"dataloader": {"at_end": "loop"}, "datasets": [{"path": "a"}, {"path": "b"}]}]),
        ("3", [{3: 4}]),
    ],
)
def test_mistake_in_a_dict_is_named_by_its_path(path: str, changes: list[dict[Any, Any]]) -> None:
    for change in changes:
        assert [(mistake.path, mistake.line) for mistake in check_config(GOOD | change)] == [(path, None)]


HEAD = "version: 1\ndatasets:\n  - path: a\n"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", [("", None)]),
        ("- 1\n", [("", 1)]),
        ("version: 1\n", [("datasets", 1)]),
        ("a: [1\nb: 2\n", [("", 2)]),
        (f"{HEAD}consumer: !!python/object:os.x 3\nmax_wait: -1\n", [("consumer", 4), ("max_wait", 5)]),
        (f"{HEAD}consumer: 2020-99-99\n", [("consumer", 4)]),
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


def test_what_is_too_large_or_no_text_or_holds_itself_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "train.yaml"
    for data in (b"#" * ((1 << 20) + 1), b"version: \xff"):
        file.write_bytes(data)
        (mistake,) = check_config(file)
        assert (mistake.path, mistake.line) == ("", None)
    config: dict[str, Any] = {**GOOD}
    config["datasets"] = [config]
    assert len(check_config(config)) == 1
    lines = ["a0: &a0 [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 9)]
    (mistake,) = check_config(write(tmp_path, "\n".join(lines)))
    assert "10000 entries" in mistake.text


def test_nothing_is_imported_where_that_is_not_wanted(tmp_path: Path) -> None:
    (tmp_path / "raises_when_imported.py").write_text("raise SystemExit(3)\n")
    config = GOOD | {"datasets": [{"path": "a", "steps": [{"filter_fn": "raises_when_imported:f"}]}]}
    assert check_config(config, imports=False) == []
    assert "raises_when_imported" not in sys.modules


@pytest.mark.parametrize("package", ["yaml", "pydantic"])
def test_missing_package_is_said_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    refusal_of(ImportError, r"lazyshard\[config\]", check_config, write(tmp_path, "version: 1\n"))
    if package == "yaml":
        assert check_config(GOOD) == []


def test_what_is_of_no_version_is_refused(tmp_path: Path) -> None:
    for config in ({"version": 1, "dataset": []}, {"version": -1}, {"dataset": 3}):
        assert check_config(config)
    assert places(tmp_path, "seed: 1\nversion: 0\n") == [("version", 2)]


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("./rows/chat.py:Keep.one", "did you mean rows.chat:Keep.one?"),
        ("rows.py", "did you mean rows:function?"),
        ("my-rows.py:keep", ""),
        # This has the form of a name, and could be the module py of a package rows.
        ("rows.py:keep", "did you mean rows:keep?"),
    ],
)
def test_file_in_the_place_of_a_module_is_told_how_it_is_named(name: str, hint: str) -> None:
    caught = raised(FunctionMissing, named_function, name)
    assert str(caught).endswith(hint) and ("did you mean" in str(caught)) == bool(hint)
