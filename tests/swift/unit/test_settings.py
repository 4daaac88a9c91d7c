"""Each refusal of `arguments` names the argument; what follows from what works."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Any

import pytest

from lazyshard.format.cursor import check_consumer
from lazyshard_swift import settings
from lazyshard_swift.arguments import check_combinations
from lazyshard_swift.errors import SettingsRefused
from lazyshard_swift.settings import Progress
from tests.swift.unit.runs import hugging_face, megatron, refused


class IntervalStrategy(str, Enum):
    """As transformers' own, which takes seconds to import."""

    NO = "no"
    EPOCH = "epoch"


def assert_refused(args: Any, argument: str, *words: str) -> None:
    with refused(SettingsRefused, *words, argument=argument):
        check_combinations(args)


SKIPS = ["samples 1:2", "", "steps 5", "steps 7:5", "rows 1:2", f"samples 1:{10**18 * 9}"]

# By argument, the values that are refused whatever else is given.
VALUES: dict[str, list[Any]] = {
    "dataset": [
        *([], None, [""], ["/a", ""], ["/a\0b"]),
        *(["/a#500"], ["s3://b/a#500"], ["AI-ModelScope/alpaca#7"], ["AI-ModelScope/alpaca-gpt4-data-en"]),
        *(["/a", "/b", "/c/../a"], ["s3://b/a", "/b", "s3://b/a/"], ["/not there/a"]),
    ],
    "streaming": [True],
    "cached_dataset": [["/cache"]],
    "truncation_strategy": ["split"],
    "split_dataset_ratio": [0.01],
    "interleave_prob": [[0.5, 0.5]],
    "rlhf_type": ["grpo", "ppo", "kto"],
    "sharded_lazy_encode_cache": [""],
    "sharded_lazy_encode_cache_size": ["20GB"],
    "sharded_lazy_max_wait": [0.0, -1.0, float("nan"), float("inf")],
    "sharded_lazy_shuffle_window": [-1],
    "sharded_lazy_shuffle_distance": [0],
    "sharded_lazy_unit": ["row", "", "0", "-4", "1e3", True, "9" * 19],
    "sharded_lazy_samples_per_chunk": [0, -3],
    "sharded_lazy_on_end": ["halt", ""],
    "sharded_lazy_on_bad_sample": ["drop"],
    "sharded_lazy_skip": SKIPS[1:],
    # A name that no cursor can have, before training: not at the first checkpoint, hours later.
    "sharded_lazy_consumer": ["", "a/b", ".hidden", "a\nb", "x" * 201, "run.reading"],
}

# By argument, what does not go together.
TOGETHER: list[tuple[str, dict[str, Any]]] = [
    ("cached_dataset", {"cached_val_dataset": ["/cache"]}),
    ("sharded_lazy_skip", {"dataset": ["/a", "/b"], "sharded_lazy_skip": SKIPS[0]}),
    *(
        ("sharded_lazy_encode_cache_size", {"sharded_lazy_encode_cache": "/c", "sharded_lazy_encode_cache_size": size})
        for size in ("20 apples", "4095")
    ),
    ("group_by_length", {"group_by_length": True, "dataset": ["/a", "/b"]}),
    ("group_by_length", {"group_by_length": True, "packing": True}),
    ("group_by_length", {"group_by_length": True, "train_dataloader_shuffle": False}),
    ("group_by_length", {"group_by_length": True, "sharded_lazy_shuffle_window": 0}),
    ("group_by_length", {"group_by_length": True, "sharded_lazy_shuffle_distance": 9}),
    ("group_by_length", {"group_by_length": True, "sharded_lazy_unit": "batch"}),
    ("group_by_length", {"group_by_length": True, "sharded_lazy_skip": "chunks 1:2"}),
    ("packing", {"packing": True, "rlhf_type": "dpo"}),
    ("sharded_lazy_max_wait", {"sharded_lazy_max_wait": 1741.0, "ddp_timeout": 1800}),
    ("sharded_lazy_shuffle_window", {"sharded_lazy_shuffle_window": 2, "train_dataloader_shuffle": False}),
    ("sharded_lazy_shuffle_distance", {"sharded_lazy_shuffle_distance": 9, "sharded_lazy_shuffle_window": 2}),
    ("sharded_lazy_shuffle_distance", {"sharded_lazy_shuffle_distance": 9, "train_dataloader_shuffle": False}),
    ("sharded_lazy_shuffle_distance", {"sharded_lazy_shuffle_distance": 9, "dataset": ["/a", "/b"]}),
]
REFUSED = [(name, {name: value}) for name, values in VALUES.items() for value in values] + TOGETHER


@pytest.mark.parametrize("make", [megatron, hugging_face])
def test_ms_swifts_defaults_are_accepted_and_each_refusal_names_its_argument(make: Any) -> None:
    check_combinations(make())
    for argument, changes in REFUSED:
        assert_refused(make(**changes), argument)


def test_refusals_of_one_trainer_alone() -> None:
    """What the other one has no trouble with."""
    resumed = {"resume_from_checkpoint": "/runs/one/checkpoint-3"}
    for argument, changes in (
        ("sequence_parallel_size", {"sequence_parallel_size": 2}),
        ("use_flash_ckpt", {"use_flash_ckpt": True}),
        ("auto_find_batch_size", {"auto_find_batch_size": True}),
        ("ignore_data_skip", {"ignore_data_skip": True, **resumed}),
    ):
        assert_refused(hugging_face(**changes), argument)
        check_combinations(megatron(**changes))
    assert_refused(megatron(group_by_length=True, padding_free=True), "group_by_length")
    check_combinations(megatron(group_by_length=True, padding_free=False))


WORKS: list[dict[str, Any]] = [
    {"rlhf_type": "dpo", "group_by_length": True, "padding_free": True},
    {"truncation_strategy": "delete", "split_dataset_ratio": 0.0, "interleave_prob": [], "sequence_parallel_size": 1},
    {"rlhf_type": None, "split_dataset_ratio": None, "interleave_prob": None, "sequence_parallel_size": None},
    {"cached_dataset": [], "cached_val_dataset": [], "ignore_data_skip": True},
    {"ignore_data_skip": True, "resume_only_model": True, "resume_from_checkpoint": "/runs/one/checkpoint-3"},
    {"sharded_lazy_max_wait": 1740.0, "ddp_timeout": 1800},
    {"sharded_lazy_max_wait": float("inf"), "ddp_timeout": None},
    {"sharded_lazy_shuffle_window": 0, "train_dataloader_shuffle": False, "sharded_lazy_samples_per_chunk": 1},
    {"sharded_lazy_on_bad_sample": "raise", "sharded_lazy_on_end": "repeat", "sharded_lazy_consumer": "run 1"},
    {"sharded_lazy_skip": "samples 1:2, steps 3:4", "sharded_lazy_take_over": True},
    {"sharded_lazy_encode_cache": "cache", "sharded_lazy_encode_cache_size": "1.5 GiB"},
]


def test_what_works_is_not_refused() -> None:
    for changes in WORKS:
        check_combinations(hugging_face(**changes))


def test_file_as_dataset_is_refused_with_the_command_that_makes_a_stream_of_it(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text("{}\n")
    assert_refused(megatron(dataset=[str(file)]), "dataset", f"lazyshard-producer run --source {file}")
    # A directory with a number sign in its name is accepted if it is there.
    (tmp_path / "a#5").mkdir()
    check_combinations(megatron(dataset=[str(tmp_path / "a#5")]))
    check_combinations(megatron(dataset=[str(tmp_path / "a#5" / "not there yet")]))


def test_stream_of_validation_data_is_refused(tmp_path: Path) -> None:
    for name in ("stream.json", "chunk_00000.jsonl"):
        files, stream = tmp_path / name / "files", tmp_path / name / "stream"
        for file in (files / "rows.jsonl", stream / name):
            file.parent.mkdir(parents=True)
            file.touch()
        assert_refused(megatron(val_dataset=[str(files), str(stream)]), "val_dataset", f"{stream}/chunk_*.jsonl")
        check_combinations(megatron(val_dataset=str(files)))
        check_combinations(megatron(val_dataset=[str(stream / name)]))


@pytest.mark.parametrize(
    ("args", "live", "expected"),
    [
        (megatron(train_iters=7), False, Progress(7, None)),
        (megatron(num_train_epochs=2), False, Progress(None, 2)),
        # As ms-swift: epochs count before Megatron's iterations, steps before epochs in the other trainer.
        (megatron(train_iters=7, num_train_epochs=2), False, Progress(None, 2)),
        (megatron(train_iters=7, num_train_epochs=2), True, Progress(7, None)),
        (megatron(train_iters=7), True, Progress(7, None)),
        (hugging_face(max_steps=7), False, Progress(7, None)),
        (hugging_face(max_steps=7), True, Progress(7, None)),
        (hugging_face(), False, Progress(None, 3.0)),
        (hugging_face(max_steps=0), False, Progress(None, 3.0)),
        (hugging_face(num_train_epochs=0.5), False, Progress(None, 0.5)),
        # Without a length: the argument that would give one.
        (megatron(num_train_epochs=2), True, "train_iters"),
        (megatron(train_iters=0, num_train_epochs=2), True, "train_iters"),
        (megatron(), True, "train_iters"),
        (megatron(), False, "train_iters"),
        (hugging_face(), True, "max_steps"),
        (hugging_face(max_steps=0), True, "max_steps"),
    ],
)
def test_progress(args: Any, live: bool, expected: Progress | str) -> None:
    if isinstance(expected, Progress):
        assert settings.progress(args, live) == expected
        return
    with refused(SettingsRefused, argument=expected):
        settings.progress(args, live)


@pytest.mark.parametrize("make", [megatron, hugging_face])
def test_live_stream_has_no_epochs_to_save_after(make: Any) -> None:
    for name in ("save_strategy", "eval_strategy"):
        for strategy in ("epoch", "EPOCH", IntervalStrategy.EPOCH):
            args = make(train_iters=7, max_steps=7, **{name: strategy})
            with refused(SettingsRefused, argument=name):
                settings.progress(args, True)
            assert settings.progress(args, False) == Progress(7, None)
        for other in ("steps", IntervalStrategy.NO, None):
            assert settings.progress(make(train_iters=7, max_steps=7, **{name: other}), True) == Progress(7, None)


def test_consumer_is_the_same_over_the_restarts_of_a_run_and_another_one_for_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    starts = ["/runs/one", "/runs/one/", "/runs/two/../one", "/runs/one/v0-20261121-010203"]
    starts += ["/runs/one/v12-20270101-235959", "/runs/one/v12-20270101-235959/"]
    assert {settings.consumer_name(folder) for folder in starts} == {"one-0436b62a"}
    others = ["/runs/one", "/runs/two", "/other/one", "/runs/one/v0", "/runs/one/v0-2026", "/runs/one/a", "/", "/runs"]
    assert len({settings.consumer_name(folder) for folder in others}) == len(others)
    monkeypatch.chdir(tmp_path)
    assert settings.consumer_name("output") == settings.consumer_name(str(tmp_path / "output"))


@pytest.mark.parametrize(
    ("folder", "begins"),
    [
        ("/", "run-"),
        ("/runs/数据", "run-"),
        ("/runs/.hidden", "hidden-"),
        ("/runs/a b\nc", "a-b-c-"),
        ("/runs/a.reading", "a-reading-"),
        ("/runs/" + "x" * 255, "x" * 64 + "-"),
        ("/runs/" + b"\xff\xfe".decode("utf-8", "surrogateescape"), "run-"),
        ("/runs/-", "run-"),
    ],
)
def test_consumer_is_a_name_that_a_cursor_can_have(folder: str, begins: str) -> None:
    name = settings.consumer_name(folder)
    assert name.startswith(begins)
    assert check_consumer(name) == name
    assert len(name) == len(begins) + 8
