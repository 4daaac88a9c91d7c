"""`arguments`: our fields in a class of ms-swift's shape, what is refused, and what follows."""

import dataclasses
import importlib
import shlex
import sys
from enum import Enum
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from lazyshard.format.state import check_consumer
from lazyshard_swift import arguments
from lazyshard_swift.arguments import check_combinations, progress_of
from lazyshard_swift.checkpoints import consumer_name
from lazyshard_swift.errors import SettingsRefused
from tests.stream.streams import raised
from tests.swift.unit.runs import DEFAULTS, hugging_face, megatron, tells

NAME = "stand_in_data_args"
# As swift/arguments/base_args/data_args.py.
SOURCE = """
from dataclasses import dataclass, field
from typing import List, Literal, Optional, Union
@dataclass
class DataArguments:
    \"\"\"Holds arguments related to data.\"\"\"
    dataset: List[str] = field(default_factory=list)
    data_seed: int = 42
    stopping_strategy: Literal['first_exhausted', 'all_exhausted'] = 'first_exhausted'
    columns: Optional[Union[dict, str]] = None
    streaming: bool = False
    model_name: Optional[List[str]] = field(default=None, metadata={'help': "e.g. ['name']"})
    def __post_init__(self):
        self.seen = list(self.dataset)
    def of_the_original(self):
        return self.data_seed
"""
# What is made of its class.
SUBCLASSES = """
from dataclasses import dataclass
import stand_in_data_args
@dataclass
class BaseArguments(stand_in_data_args.DataArguments):
    output_dir: str = 'output'
    def __post_init__(self):
        stand_in_data_args.DataArguments.__post_init__(self)
@dataclass
class SftArguments(BaseArguments):
    max_steps: int = -1
@dataclass
class InferArguments(BaseArguments):
    max_batch_size: int = 1
"""


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    calls: list[bool] = []
    monkeypatch.setattr(arguments, "install_exits", lambda: calls.append(True))
    return calls


@pytest.fixture
def classes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, installed: list[bool]) -> Any:
    """The classes that inherit from the one that is extended."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    for name, source in ((NAME, SOURCE), ("stand_in_arguments", SUBCLASSES)):
        (tmp_path / f"{name}.py").write_text(source)
        monkeypatch.delitem(sys.modules, name, raising=False)
        found = importlib.import_module(name)
        monkeypatch.setitem(sys.modules, name, found)
        if name == NAME:
            arguments.extend(found)
    return found


def parse(kind: Any, line: str) -> Any:
    parser = importlib.import_module("transformers").HfArgumentParser([kind])
    found, unknown = parser.parse_args_into_dataclasses(shlex.split(line), return_remaining_strings=True)
    assert unknown == []
    return found


def test_without_the_flag_everything_is_as_before(classes: Any, installed: list[bool], notices: list[str]) -> None:
    args = parse(classes.SftArguments, "--dataset a b#5 c.jsonl --streaming true --data_seed 7")
    assert args.dataset == args.seen == ["a", "b#5", "c.jsonl"]
    assert (args.streaming, args.of_the_original()) == (True, 7)
    assert DEFAULTS.items() <= vars(args).items()
    assert (installed, notices) == ([], [])


def test_a_forgotten_flag_is_warned_of(classes: Any, cautions: list[str], tmp_path: Path) -> None:
    (tmp_path / "stream.json").touch()
    parse(classes.SftArguments, f"--dataset {tmp_path} other.jsonl")
    assert len(cautions) == 1 and f"--dataset {tmp_path} " in cautions[0] and "--sharded_lazy true" in cautions[0]


def test_command_line(classes: Any) -> None:
    given: dict[str, Any] = {"samples_per_chunk": 1000, "max_wait": 1e3, "shuffle_window": 0, "unit": "500"}
    given |= {"consumer": "one", "on_bad_sample": "raise", "on_end": "repeat"}
    given |= {"take_over": True, "encode_cache": "/c", "encode_cache_size": "9GB", "skip": "samples 1:8, chunks 7:8"}
    options = " ".join(f"--sharded_lazy_{name} '{value}'" for name, value in given.items())
    whole = {"sharded_lazy": True} | {f"sharded_lazy_{name}": value for name, value in given.items()}
    for flag in ("--sharded_lazy", "--sharded-lazy 1", "--sharded_lazy yes", "--sharded_lazy true"):
        for line, expected in ((flag, DEFAULTS | {"sharded_lazy": True}), (f"{options} {flag}", whole)):
            args = vars(parse(classes.SftArguments, f"--dataset /one {line}"))
            assert {name: args[name] for name in expected} == expected
            assert [type(args[name]) for name in expected] == list(map(type, expected.values()))
    assert set(DEFAULTS) - set(whole) == {"sharded_lazy_shuffle_distance"}
    args = parse(classes.SftArguments, "--dataset /one --sharded_lazy --sharded_lazy_shuffle_distance 10000")
    assert args.sharded_lazy_shuffle_distance == 10_000


def test_wrong_value_is_refused_by_the_parser(classes: Any) -> None:
    for line in (
        *(" perhaps", "_on_end halt", "_on_bad_sample skip", "_samples_per_chunk many"),
        *("_shuffle_window 1.5", "_shuffle_distance far", "_max_wait soon"),
    ):
        assert raised(SystemExit, parse, classes.SftArguments, f"--sharded_lazy{line}").code == 2


@pytest.mark.usefixtures("classes")
def test_class_passes_for_the_original_and_is_extended_once_and_again_when_loaded_again() -> None:
    module = sys.modules[NAME]
    kind = module.DataArguments
    assert (kind.__name__, kind.__qualname__, kind.__module__) == ("DataArguments", "DataArguments", NAME)
    assert kind.__doc__ == "Holds arguments related to data."
    names = [field.name for field in dataclasses.fields(kind)]
    assert (names[:2], names[-len(DEFAULTS) :]) == (["dataset", "data_seed"], list(DEFAULTS))
    # Defaults that are made are made for each.
    one, two = kind(), kind()
    one.dataset.append("a")
    assert two.dataset == []
    arguments.extend(module)
    assert module.DataArguments is kind
    importlib.reload(module)
    assert "sharded_lazy" not in module.DataArguments.__dataclass_fields__
    arguments.extend(module)
    args = module.DataArguments(dataset=["a"], sharded_lazy_max_wait=1.0)
    assert [field.name for field in dataclasses.fields(args)].count("sharded_lazy") == 1
    empty = ModuleType("empty")
    tells(raised(AttributeError, arguments.extend, empty), obj=empty, name="DataArguments")


def test_commands_that_do_not_train_put_the_flag_aside(classes: Any, installed: list[bool], notices: list[str]) -> None:
    args = parse(classes.InferArguments, "--dataset a b --sharded_lazy true")
    assert (args.sharded_lazy, args.dataset, args.seen) == (False, ["a", "b"], ["a", "b"])
    assert installed == []
    assert len(notices) == 1


def test_refusal_comes_first(classes: Any, installed: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[Any] = []
    monkeypatch.setattr(classes.BaseArguments.__mro__[2], "__post_init__", looked.append)
    line = "--dataset a --sharded_lazy true --streaming true"
    tells(raised(SettingsRefused, parse, classes.SftArguments, line), argument="streaming")
    # Errors have their exit codes before the first check.
    assert (looked, installed) == ([], [True])


def test_directories_become_absolute(classes: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    (tmp_path / "a#b").mkdir()
    (tmp_path / "a.jsonl").write_text("{}\n")
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("HOME", str(tmp_path))
    for given, found in (
        ("stream", ["here/stream"]),
        ("../here/stream/", ["here/stream"]),
        (["./one", "two"], ["here/one", "here/two"]),
        ("~/stream", ["stream"]),
        (["~/a#b"], ["a#b"]),
        (["~/a.jsonl"], ["a.jsonl"]),
    ):
        args = classes.SftArguments(dataset=given, sharded_lazy=True)
        assert args.dataset == args.seen == [str(tmp_path / name) for name in found]
        # ms-swift makes arguments of arguments, of checkpoints' args.json for instance.
        args.__post_init__()
        assert args.dataset == args.seen
    tells(raised(SettingsRefused, classes.SftArguments, dataset=["~/b.jsonl"], sharded_lazy=True), argument="dataset")


class IntervalStrategy(str, Enum):
    """As transformers' own, which takes seconds to import."""

    NO = "no"
    EPOCH = "epoch"


def assert_refused(args: Any, argument: str, *words: str) -> None:
    tells(raised(SettingsRefused, check_combinations, args), *words, argument=argument)


# By argument, the values that are refused whatever else is given.
VALUES: dict[str, list[Any]] = {
    "dataset": [
        *([], None, [""], ["/a", ""], ["/a\0b"]),
        *(["/a#0"], ["s3://b/a#x"], ["/no such/folder#7"], ["a/hub/name"], ["/rows.jsonl"]),
        *(["/a", "/b", "/c/../a"], ["s3://b/a", "/b", "s3://b/a/"], ["/not there/a"]),
    ],
    "streaming": [True],
    "cached_dataset": [["/cache"]],
    "truncation_strategy": ["split"],
    "split_dataset_ratio": [1.0, -0.1, 1.5, 1e-9, 0.9999999, float("nan")],
    "interleave_prob": [[0.5, 0.5]],
    "rlhf_type": ["ppo"],
    "sharded_lazy_encode_cache": [""],
    "sharded_lazy_encode_cache_size": ["20GB"],
    "sharded_lazy_max_wait": [0.0, -1.0, float("nan"), float("inf")],
    "sharded_lazy_shuffle_window": [-1],
    "sharded_lazy_shuffle_distance": [0],
    "sharded_lazy_unit": ["row", "", "0", "-4", "1e3", True, "9" * 19],
    "sharded_lazy_samples_per_chunk": [0, -3],
    "sharded_lazy_on_end": ["halt", ""],
    "sharded_lazy_on_bad_sample": ["drop"],
    "sharded_lazy_skip": ["", "steps 5", "steps 7:5", "rows 1:2", f"samples 1:{10**18 * 9}"],
    # A name that no cursor can have, before training: not at the first checkpoint, hours later.
    "sharded_lazy_consumer": ["", "a/b", ".hidden", "a\nb", "x" * 201, "run.reading"],
}
# By argument, what does not go together.
TOGETHER: list[tuple[str, dict[str, Any]]] = [
    ("cached_dataset", {"cached_val_dataset": ["/cache"]}),
    ("sharded_lazy_skip", {"dataset": ["/a", "/b"], "sharded_lazy_skip": "samples 1:2"}),
    ("sharded_lazy_encode_cache_size", {"sharded_lazy_encode_cache": "/c", "sharded_lazy_encode_cache_size": "1 bag"}),
    ("sharded_lazy_encode_cache_size", {"sharded_lazy_encode_cache": "/c", "sharded_lazy_encode_cache_size": "4095"}),
    *(
        ("group_by_length", {"group_by_length": True, name: value})
        for name, value in (
            *(("dataset", ["/a", "/b"]), ("packing", True), ("train_dataloader_shuffle", False)),
            *(("sharded_lazy_shuffle_window", 0), ("sharded_lazy_shuffle_distance", 9)),
            *(("sharded_lazy_unit", "batch"), ("sharded_lazy_skip", "chunks 1:2")),
        )
    ),
    ("packing", {"packing": True, "rlhf_type": "dpo"}),
    *((name, {"rlhf_type": "gkd", name: True}) for name in ("dynamic_sample", "async_generate", "group_by_length")),
    ("sharded_lazy_encode_cache", {"rlhf_type": "gkd", "sharded_lazy_encode_cache": "/c"}),
    ("teacher_model_server", {"rlhf_type": "gkd", "teacher_model_server": "rows", "lmbda": 0.5}),
    ("packing_strategy", {"packing": True, "packing_strategy": "sequential"}),
    *((name, {"split_dataset_ratio": 0.01, name: True}) for name in ("group_by_length", "data_sharding")),
    ("predict_with_generate", {"split_dataset_ratio": 0.01, "predict_with_generate": True}),
    ("predict_with_generate", {"val_dataset": ["s3://bucket/stream"], "predict_with_generate": True}),
    ("val_dataset", {"val_dataset": ["s3://bucket/stream", "rows.jsonl"]}),
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
    resumed = {"resume_from_checkpoint": "/runs/one/checkpoint-3"}
    for argument, changes in (
        ("sequence_parallel_size", {"sequence_parallel_size": 2}),
        ("use_flash_ckpt", {"use_flash_ckpt": True}),
        ("auto_find_batch_size", {"auto_find_batch_size": True}),
        ("ignore_data_skip", {"ignore_data_skip": True, **resumed}),
    ):
        assert_refused(hugging_face(**changes), argument)
        check_combinations(megatron(**changes))
    assert_refused(megatron(rlhf_type="grpo"), "rlhf_type")
    check_combinations(hugging_face(rlhf_type="grpo"))
    assert_refused(hugging_face(rlhf_type="grpo", teacher_model_server="rows"), "teacher_model_server")
    assert_refused(megatron(group_by_length=True, padding_free=True), "group_by_length")
    check_combinations(megatron(group_by_length=True, padding_free=False))


def test_what_works_is_not_refused() -> None:
    off: dict[str, Any] = {"split_dataset_ratio": 0.0, "interleave_prob": [], "sequence_parallel_size": 1}
    resumed = {"ignore_data_skip": True, "resume_from_checkpoint": "/runs/one/checkpoint-3"}
    for changes in (
        {"rlhf_type": "dpo", "group_by_length": True, "padding_free": True},
        {"rlhf_type": "kto"},
        {"rlhf_type": "gkd", "teacher_model_server": "rows", "lmbda": 0.0},
        off | {"truncation_strategy": "delete", "cached_dataset": [], "cached_val_dataset": []},
        dict.fromkeys(("rlhf_type", *off)) | {"ignore_data_skip": True},
        resumed | {"resume_only_model": True},
        {"sharded_lazy_max_wait": 1740.0, "ddp_timeout": 1800},
        {"sharded_lazy_max_wait": float("inf"), "ddp_timeout": None},
        {"sharded_lazy_shuffle_window": 0, "train_dataloader_shuffle": False, "sharded_lazy_samples_per_chunk": 1},
        {"sharded_lazy_on_bad_sample": "raise", "sharded_lazy_on_end": "repeat", "sharded_lazy_consumer": "run 1"},
        {"sharded_lazy_skip": "samples 1:2, steps 3:4", "sharded_lazy_take_over": True},
        {"sharded_lazy_encode_cache": "cache", "sharded_lazy_encode_cache_size": "1.5 GiB"},
        {"split_dataset_ratio": 0.01, "data_sharding": False},
        # With other data ms-swift sets the ratio to 0.
        {"split_dataset_ratio": 7, "val_dataset": ["rows.jsonl"], "data_sharding": True, "predict_with_generate": True},
    ):
        check_combinations(hugging_face(**changes))


@pytest.mark.usefixtures("installed")
def test_validation_data_are_streams_or_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files, stream, foreign = made = [tmp_path / name for name in ("files", "stream", "foreign")]
    for directory, name in zip(made, ("rows.jsonl", "stream.json", "chunk_00000.jsonl"), strict=True):
        directory.mkdir()
        (directory / name).touch()
    assert_refused(megatron(val_dataset=[str(files), str(stream)]), "val_dataset", str(stream))
    assert_refused(megatron(val_dataset=[str(foreign)]), "val_dataset", f"{foreign}/chunk_*.jsonl")
    monkeypatch.chdir(tmp_path)
    for given, expected in (
        ("files", "files"),
        (["foreign/chunk_00000.jsonl"], ["foreign/chunk_00000.jsonl"]),
        ("stream", [str(stream)]),
        (["./stream", "s3://bucket/other"], [str(stream), "s3://bucket/other"]),
    ):
        args = megatron(val_dataset=given)
        arguments.check(args)
        assert args.val_dataset == expected


def test_shares_of_a_ratio() -> None:
    for ratio, shares in ((0.01, (99, 1)), (0.5, (1, 1)), (0.35, (13, 7)), (1e-5, (99_999, 1)), (1 / 3, (2, 1))):
        assert arguments.shares_of({"split_dataset_ratio": ratio}.get) == shares
    for given in ({}, {"split_dataset_ratio": 0.0}, {"split_dataset_ratio": 0.01, "val_dataset": ["rows.jsonl"]}):
        assert arguments.shares_of(given.get) is None


def test_progress() -> None:
    both = {"train_iters": 7, "num_train_epochs": 2}
    for args, live, expected in (
        (megatron(train_iters=7), False, (7, None)),
        (megatron(num_train_epochs=2), False, (None, 2)),
        # As ms-swift: epochs count before Megatron's iterations, steps before epochs in the other trainer.
        (megatron(**both), False, (None, 2)),
        (megatron(**both), True, (7, None)),
        (hugging_face(max_steps=7), False, (7, None)),
        (hugging_face(), False, (None, 3.0)),
        (hugging_face(num_train_epochs=0.5), False, (None, 0.5)),
    ):
        assert progress_of(args, live) == expected
    # Without a length: the argument that would give one.
    for args, live, argument in (
        (megatron(num_train_epochs=2), True, "train_iters"),
        (megatron(train_iters=0, num_train_epochs=2), True, "train_iters"),
        (megatron(), False, "train_iters"),
        (hugging_face(), True, "max_steps"),
        (hugging_face(max_steps=0), True, "max_steps"),
    ):
        tells(raised(SettingsRefused, progress_of, args, live), argument=argument)


@pytest.mark.parametrize("make", [megatron, hugging_face])
def test_live_stream_has_no_epochs_to_save_after(make: Any) -> None:
    for name, strategy, live, ok in (
        ("save_strategy", "epoch", True, False),
        ("save_strategy", IntervalStrategy.EPOCH, True, False),
        ("eval_strategy", "EPOCH", True, False),
        ("eval_strategy", IntervalStrategy.EPOCH, False, True),
        ("save_strategy", IntervalStrategy.NO, True, True),
        ("eval_strategy", None, True, True),
    ):
        args = make(train_iters=7, max_steps=7, **{name: strategy})
        if ok:
            assert progress_of(args, live) == (7, None)
            continue
        tells(raised(SettingsRefused, progress_of, args, live), argument=name)


def test_consumer_is_that_of_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    starts = ["/runs/one", "/runs/one/", "/runs/two/../one", "/runs/one/v12-20270101-235959/"]
    assert {consumer_name(folder) for folder in starts} == {"one-0436b62a"}
    others = ["/runs/one", "/runs/two", "/other/one", "/runs/one/v0", "/runs/one/v0-2026", "/runs/one/a", "/", "/runs"]
    assert len({consumer_name(folder) for folder in others}) == len(others)
    monkeypatch.chdir(tmp_path)
    assert consumer_name("output") == consumer_name(str(tmp_path / "output"))
    # It is a name that a cursor can have.
    for folder, begins in {
        **dict.fromkeys(("/", "/runs/数据", "/runs/-", "/runs/" + b"\xff".decode("utf-8", "surrogateescape")), "run-"),
        "/runs/.hidden": "hidden-",
        "/runs/a b\nc": "a-b-c-",
        "/runs/a.reading": "a-reading-",
        "/runs/" + "x" * 255: "x" * 64 + "-",
    }.items():
        name = consumer_name(folder)
        assert (name[: len(begins)], len(name), check_consumer(name)) == (begins, len(begins) + 8, name)
