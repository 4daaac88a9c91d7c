"""Each refusal of `settings_checks` names the argument and a way out; what follows from what works."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Any

import pytest

from lazyshard.format import check_consumer
from lazyshard_swift import settings
from lazyshard_swift.errors import SettingsRefused
from lazyshard_swift.settings import Progress
from lazyshard_swift.settings_checks import check_combinations
from tests.swift.unit.runs import hugging_face, megatron


class IntervalStrategy(str, Enum):
    """As transformers' own, which takes seconds to import."""

    NO = "no"
    STEPS = "steps"
    EPOCH = "epoch"


def refusal(args: Any) -> SettingsRefused:
    with pytest.raises(SettingsRefused) as refused:
        check_combinations(args)
    return refused.value


@pytest.mark.parametrize("args", [megatron(), hugging_face()], ids=["megatron", "swift"])
def test_ms_swifts_defaults_are_accepted(args: Any) -> None:
    check_combinations(args)


# Argument that the error is about, changes, and words of the way out.
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("dataset", {"dataset": []}, "takes stream directories"),
    ("dataset", {"dataset": None}, "takes stream directories"),
    ("dataset", {"dataset": [""]}, "stream directories"),
    ("dataset", {"dataset": ["/a", "/b", "/c/../a"]}, "one stream is given twice"),
    ("dataset", {"dataset": ["s3://b/a", "/b", "s3://b/a/"]}, "one stream is given twice"),
    ("dataset", {"dataset": ["s3://b/a#500"]}, "give the stream directory alone"),
    ("dataset", {"dataset": ["/a", ""]}, "an empty name"),
    ("dataset", {"dataset": ["/not there/a"]}, "nor is /not there, in which a producer would make it"),
    ("dataset", {"dataset": ["AI-ModelScope/alpaca-gpt4-data-en"]}, "the name of a data set on a hub is none"),
    ("sharded_lazy_skip", {"dataset": ["/a", "/b"], "sharded_lazy_skip": "samples 1:2"}, "names samples of one stream"),
    ("dataset", {"dataset": ["/a#500"]}, "give the stream directory alone"),
    ("sharded_lazy_encode_cache", {"sharded_lazy_encode_cache": ""}, "is a directory of this node"),
    ("sharded_lazy_encode_cache_size", {"sharded_lazy_encode_cache_size": "20GB"}, "give both, or none"),
    (
        "sharded_lazy_encode_cache_size",
        {"sharded_lazy_encode_cache": "/c", "sharded_lazy_encode_cache_size": "20 apples"},
        "expected a number of bytes such as 20GB",
    ),
    (
        "sharded_lazy_encode_cache_size",
        {"sharded_lazy_encode_cache": "/c", "sharded_lazy_encode_cache_size": "4095"},
        "at least 4096 bytes, got 4095: less keeps no sample",
    ),
    ("dataset", {"dataset": ["AI-ModelScope/alpaca#7"]}, "give the stream directory alone"),
    ("dataset", {"dataset": ["/a\0b"]}, "NUL"),
    ("streaming", {"streaming": True}, "leave out --streaming"),
    ("cached_dataset", {"cached_dataset": ["/cache"]}, "leave out one of them"),
    ("cached_dataset", {"cached_val_dataset": ["/cache"]}, "leave out one of them"),
    ("group_by_length", {"group_by_length": True, "dataset": ["/a", "/b"]}, "train one after the other"),
    ("group_by_length", {"group_by_length": True, "packing": True}, "packs are all of about one length already"),
    ("group_by_length", {"group_by_length": True, "train_dataloader_shuffle": False}, "leave out one of them"),
    ("group_by_length", {"group_by_length": True, "sharded_lazy_shuffle_window": 0}, "_window 0 is for an order of"),
    ("group_by_length", {"group_by_length": True, "sharded_lazy_shuffle_distance": 9}, "leave out one of them"),
    ("group_by_length", {"group_by_length": True, "sharded_lazy_unit": "batch"}, "leave out one of them"),
    ("group_by_length", {"group_by_length": True, "sharded_lazy_skip": "chunks 1:2"}, "leave out one of them"),
    ("packing", {"packing": True, "rlhf_type": "dpo"}, "for sft and pt; leave it out"),
    ("truncation_strategy", {"truncation_strategy": "split"}, "choose delete, left or right"),
    ("split_dataset_ratio", {"split_dataset_ratio": 0.01}, "--val_dataset FILE"),
    ("interleave_prob", {"interleave_prob": [0.5, 0.5]}, "has 2 weights for 1 streams"),
    ("rlhf_type", {"rlhf_type": "grpo"}, "dpo, orpo, simpo, cpo, rm, sft and pt"),
    ("rlhf_type", {"rlhf_type": "ppo"}, "works with dpo"),
    ("rlhf_type", {"rlhf_type": "kto"}, "works with dpo"),
    ("sharded_lazy_max_wait", {"sharded_lazy_max_wait": 0.0}, "above 0"),
    ("sharded_lazy_max_wait", {"sharded_lazy_max_wait": -1.0}, "above 0"),
    ("sharded_lazy_max_wait", {"sharded_lazy_max_wait": float("nan")}, "above 0"),
    ("sharded_lazy_max_wait", {"sharded_lazy_max_wait": float("inf")}, "raise --ddp_timeout or wait less"),
    ("sharded_lazy_max_wait", {"sharded_lazy_max_wait": 1741.0, "ddp_timeout": 1800}, "raise --ddp_timeout"),
    ("sharded_lazy_shuffle_window", {"sharded_lazy_shuffle_window": -1}, "0 for none"),
    (
        "sharded_lazy_shuffle_window",
        {"sharded_lazy_shuffle_window": 2, "train_dataloader_shuffle": False},
        "leave out one of them",
    ),
    ("sharded_lazy_shuffle_distance", {"sharded_lazy_shuffle_distance": 0}, "--sharded_lazy_shuffle_window 0 keeps"),
    (
        "sharded_lazy_shuffle_distance",
        {"sharded_lazy_shuffle_distance": 9, "sharded_lazy_shuffle_window": 2},
        "leave out one of them",
    ),
    (
        "sharded_lazy_shuffle_distance",
        {"sharded_lazy_shuffle_distance": 9, "train_dataloader_shuffle": False},
        "leave out one of them",
    ),
    (
        "sharded_lazy_shuffle_distance",
        {"sharded_lazy_shuffle_distance": 9, "dataset": ["/a", "/b"]},
        "give --sharded_lazy_shuffle_window, which is in chunks of each",
    ),
    ("sharded_lazy_unit", {"sharded_lazy_unit": "row"}, "one of chunk, sample, batch, auto or a number of samples"),
    ("sharded_lazy_unit", {"sharded_lazy_unit": ""}, "from 1, got ''"),
    ("sharded_lazy_unit", {"sharded_lazy_unit": "0"}, "from 1, got '0'"),
    ("sharded_lazy_unit", {"sharded_lazy_unit": "-4"}, "from 1, got '-4'"),
    ("sharded_lazy_unit", {"sharded_lazy_unit": "1e3"}, "from 1, got '1e3'"),
    ("sharded_lazy_unit", {"sharded_lazy_unit": True}, "from 1, got True"),
    ("sharded_lazy_unit", {"sharded_lazy_unit": "9" * 19}, "a number of samples from 1, got '9999"),
    ("sharded_lazy_samples_per_chunk", {"sharded_lazy_samples_per_chunk": 0}, "a number from 1"),
    ("sharded_lazy_samples_per_chunk", {"sharded_lazy_samples_per_chunk": -3}, "a number from 1"),
    ("sharded_lazy_on_end", {"sharded_lazy_on_end": "halt"}, "one of stop, repeat"),
    ("sharded_lazy_on_end", {"sharded_lazy_on_end": ""}, "one of stop, repeat"),
    ("sharded_lazy_on_bad_sample", {"sharded_lazy_on_bad_sample": "drop"}, "one of substitute, raise"),
]


@pytest.mark.parametrize("make", [megatron, hugging_face])
@pytest.mark.parametrize(("argument", "changes", "way_out"), REFUSED)
def test_refusal_names_the_argument_and_the_way_out(
    make: Any, argument: str, changes: dict[str, Any], way_out: str
) -> None:
    error = refusal(make(**changes))
    named = next(iter(changes)) if argument == "cached_dataset" else argument
    assert error.argument == argument
    assert f"--{argument}" in str(error) or f"--{named}" in str(error)
    assert way_out in str(error)


def test_padding_that_megatron_does_not_make_is_not_saved_by_grouping() -> None:
    error = refusal(megatron(group_by_length=True, padding_free=True))
    assert error.argument == "group_by_length"
    assert "leave it out, or give --padding_free false" in str(error)
    check_combinations(megatron(group_by_length=True, padding_free=False))


REFUSED_IN_SWIFT: list[tuple[str, dict[str, Any], str]] = [
    ("sequence_parallel_size", {"sequence_parallel_size": 2}, "--context_parallel_size N"),
    ("use_flash_ckpt", {"use_flash_ckpt": True}, "leave it out"),
    ("auto_find_batch_size", {"auto_find_batch_size": True}, "leave it out"),
    (
        "ignore_data_skip",
        {"ignore_data_skip": True, "resume_from_checkpoint": "/runs/one/checkpoint-3"},
        "--resume_only_model true --ignore_data_skip true",
    ),
]


@pytest.mark.parametrize(("argument", "changes", "way_out"), REFUSED_IN_SWIFT)
def test_refusal_of_the_hugging_face_trainer_alone(argument: str, changes: dict[str, Any], way_out: str) -> None:
    error = refusal(hugging_face(**changes))
    assert error.argument == argument
    assert f"--{argument}" in str(error)
    assert way_out in str(error)
    check_combinations(megatron(**changes))


@pytest.mark.parametrize(
    "changes",
    [
        {"rlhf_type": None},
        {"rlhf_type": "dpo"},
        {"truncation_strategy": "delete"},
        {"split_dataset_ratio": 0.0},
        {"split_dataset_ratio": None},
        {"interleave_prob": None},
        {"interleave_prob": []},
        {"cached_dataset": [], "cached_val_dataset": []},
        {"sequence_parallel_size": 1},
        {"sequence_parallel_size": None},
        {"ignore_data_skip": True},
        {"ignore_data_skip": True, "resume_only_model": True, "resume_from_checkpoint": "/runs/one/checkpoint-3"},
        {"sharded_lazy_max_wait": 1740.0, "ddp_timeout": 1800},
        {"sharded_lazy_max_wait": float("inf"), "ddp_timeout": None},
        {"sharded_lazy_shuffle_window": 0, "train_dataloader_shuffle": False},
        {"sharded_lazy_samples_per_chunk": 1},
        {"sharded_lazy_on_bad_sample": "raise", "sharded_lazy_on_end": "repeat"},
        {"sharded_lazy_consumer": "run 1"},
        {"sharded_lazy_skip": "samples 1:2, steps 3:4", "sharded_lazy_take_over": True},
        {"group_by_length": True},
        {"group_by_length": True, "padding_free": True, "rlhf_type": "dpo"},
        {"sharded_lazy_encode_cache": "cache", "sharded_lazy_encode_cache_size": "1.5 GiB"},
    ],
)
def test_what_works_is_not_refused(changes: dict[str, Any]) -> None:
    check_combinations(hugging_face(**changes))


def test_file_as_dataset_is_refused_with_the_command_that_makes_a_stream_of_it(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text("{}\n")
    error = refusal(megatron(dataset=[str(file)]))
    assert error.argument == "dataset"
    assert f"lazyshard-producer run --source {file} --out STREAM" in str(error)


@pytest.mark.parametrize("name", ["stream.json", "chunk_00000.jsonl"])
def test_stream_of_validation_data_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "rows.jsonl").touch()
    stream = tmp_path / "stream"
    stream.mkdir()
    (stream / name).touch()
    error = refusal(megatron(val_dataset=[str(tmp_path / "files"), str(stream)]))
    assert error.argument == "val_dataset"
    assert f"--val_dataset {stream}/chunk_*.jsonl" in str(error)
    check_combinations(megatron(val_dataset=str(tmp_path / "files")))
    check_combinations(megatron(val_dataset=[str(stream / "chunk_00000.jsonl")]))


def test_directory_with_a_number_sign_in_its_name_is_accepted_if_it_is_there(tmp_path: Path) -> None:
    (tmp_path / "a#5").mkdir()
    check_combinations(megatron(dataset=[str(tmp_path / "a#5")]))
    check_combinations(megatron(dataset=[str(tmp_path / "a#5" / "not there yet")]))


@pytest.mark.parametrize("name", ["", "a/b", ".hidden", "a\nb", "x" * 201, "run.reading"])
def test_name_that_no_cursor_can_have_is_refused_before_training(name: str) -> None:
    # Not at the first checkpoint, hours later.
    with pytest.raises(ValueError):
        check_consumer(name)
    error = refusal(megatron(sharded_lazy_consumer=name))
    assert error.argument == "sharded_lazy_consumer"
    assert "--sharded_lazy_consumer" in str(error)


@pytest.mark.parametrize(
    ("args", "ended", "expected"),
    [
        (megatron(train_iters=7), True, Progress(7, None)),
        (megatron(num_train_epochs=2), True, Progress(None, 2)),
        # As ms-swift: epochs count before Megatron's iterations, steps before epochs in the other trainer.
        (megatron(train_iters=7, num_train_epochs=2), True, Progress(None, 2)),
        (megatron(train_iters=7, num_train_epochs=2), False, Progress(7, None)),
        (megatron(train_iters=7), False, Progress(7, None)),
        (hugging_face(max_steps=7), True, Progress(7, None)),
        (hugging_face(max_steps=7), False, Progress(7, None)),
        (hugging_face(), True, Progress(None, 3.0)),
        (hugging_face(max_steps=0), True, Progress(None, 3.0)),
        (hugging_face(num_train_epochs=0.5), True, Progress(None, 0.5)),
    ],
)
def test_progress(args: Any, ended: bool, expected: Progress) -> None:
    assert settings.progress(args, not ended) == expected


@pytest.mark.parametrize(
    ("args", "live", "argument"),
    [
        (megatron(num_train_epochs=2), True, "train_iters"),
        (megatron(train_iters=0, num_train_epochs=2), True, "train_iters"),
        (megatron(), True, "train_iters"),
        (megatron(), False, "train_iters"),
        (hugging_face(), True, "max_steps"),
        (hugging_face(max_steps=0), True, "max_steps"),
    ],
)
def test_progress_without_a_length_is_refused(args: Any, live: bool, argument: str) -> None:
    with pytest.raises(SettingsRefused, match=f"--{argument} N") as refused:
        settings.progress(args, live)
    assert refused.value.argument == argument


@pytest.mark.parametrize("strategy", ["epoch", "EPOCH", IntervalStrategy.EPOCH])
@pytest.mark.parametrize("name", ["save_strategy", "eval_strategy"])
@pytest.mark.parametrize("args", [megatron(train_iters=7), hugging_face(max_steps=7)], ids=["megatron", "swift"])
def test_live_stream_has_no_epochs_to_save_after(args: Any, name: str, strategy: str) -> None:
    changed = type(args)(**{**vars(args), name: strategy})
    with pytest.raises(SettingsRefused, match=f"--{name} epoch needs an end .* use --{name} steps") as refused:
        settings.progress(changed, True)
    assert refused.value.argument == name
    assert settings.progress(changed, False) == Progress(7, None)


@pytest.mark.parametrize("strategy", ["steps", "no", IntervalStrategy.STEPS, IntervalStrategy.NO, None])
def test_live_stream_takes_other_strategies(strategy: Any) -> None:
    args = hugging_face(max_steps=7, save_strategy=strategy, eval_strategy=strategy)
    assert settings.progress(args, True) == Progress(7, None)


@pytest.mark.parametrize(
    ("shuffle", "live", "chunks"), [(True, True, 2), (True, False, 8), (False, True, 0), (False, False, 0)]
)
def test_default_window(shuffle: bool, live: bool, chunks: int) -> None:
    assert settings.default_window(shuffle, live) == chunks


def test_consumer_is_the_same_over_the_restarts_of_a_run() -> None:
    names = {
        settings.consumer_name(folder)
        for folder in (
            "/runs/one",
            "/runs/one/",
            "/runs/two/../one",
            "/runs/one/v0-20261121-010203",
            "/runs/one/v12-20270101-235959",
            "/runs/one/v12-20270101-235959/",
        )
    }
    assert names == {"one-0436b62a"}


def test_consumers_of_different_runs_differ() -> None:
    folders = ["/runs/one", "/runs/two", "/other/one", "/runs/one/v0", "/runs/one/v0-2026", "/runs/one/a", "/", "/runs"]
    assert len({settings.consumer_name(folder) for folder in folders}) == len(folders)


def test_consumer_of_a_relative_folder_is_that_of_the_absolute_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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


class Known:
    pass


class MegatronTrainArguments(Known):
    pass


class MegatronRLHFArguments(MegatronTrainArguments):
    pass


@pytest.mark.parametrize(
    ("args", "trains"),
    [(Known(), False), (MegatronTrainArguments(), True), (MegatronRLHFArguments(), True), (hugging_face(), True)],
)
def test_training_is_known_by_the_class_of_the_arguments(args: Any, trains: bool) -> None:
    assert settings.is_training(args) is trains


@pytest.mark.parametrize("skip", ["", "steps 5", "steps 7:5", "rows 1:2"])
def test_skip_of_another_form_is_refused_with_the_form(skip: str) -> None:
    error = refusal(megatron(train_iters=5, sharded_lazy_skip=skip))
    assert error.argument == "sharded_lazy_skip"
    assert 'ranges such as "samples 120:180, chunks 7:8, steps 41:61"' in str(error)
