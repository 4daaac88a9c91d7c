"""`arguments`: our fields in a class of ms-swift's shape, through the parser that ms-swift uses."""

from __future__ import annotations

import copy
import dataclasses
import importlib
import os
import pickle
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from lazyshard_swift import arguments, errors, ms_swift
from lazyshard_swift.errors import SettingsRefused
from tests.swift.defaults import DEFAULTS

NAME = "stand_in_data_args"

# As swift/arguments/base_args/data_args.py, and what is made of its class.
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
    train_dataloader_shuffle: bool = True
    model_name: Optional[List[str]] = field(default=None, metadata={'help': "e.g. ['name']"})

    def __post_init__(self):
        self.seen = list(self.dataset)

    def of_the_original(self):
        return self.data_seed
"""
SUBCLASSES = """
from dataclasses import dataclass
import stand_in_data_args


@dataclass
class TemplateArguments:
    max_length: int = 512

    def __post_init__(self):
        self.template_seen = True


@dataclass
class BaseArguments(TemplateArguments, stand_in_data_args.DataArguments):
    output_dir: str = 'output'

    def __post_init__(self):
        TemplateArguments.__post_init__(self)
        stand_in_data_args.DataArguments.__post_init__(self)


@dataclass
class SftArguments(BaseArguments):
    max_steps: int = -1


@dataclass
class InferArguments(BaseArguments):
    max_batch_size: int = 1
"""


def write_module(folder: Path, name: str, source: str) -> None:
    (folder / f"{name}.py").write_text(source)


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Calls of `install_exits`, which are not let through."""
    calls: list[bool] = []
    monkeypatch.setattr(arguments, "install_exits", lambda: calls.append(True))
    return calls


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, installed: list[bool]) -> ModuleType:
    """The module with the class, extended."""
    write_module(tmp_path, NAME, SOURCE)
    write_module(tmp_path, "stand_in_arguments", SUBCLASSES)
    monkeypatch.syspath_prepend(tmp_path)
    for name in (NAME, "stand_in_arguments"):
        monkeypatch.delitem(sys.modules, name, raising=False)
        monkeypatch.setattr(sys, "dont_write_bytecode", True)
    found = importlib.import_module(NAME)
    monkeypatch.setitem(sys.modules, NAME, found)
    arguments.extend(found)
    return found


@pytest.fixture
def classes(module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The classes that inherit from it."""
    found = importlib.import_module("stand_in_arguments")
    monkeypatch.setitem(sys.modules, "stand_in_arguments", found)
    return found


def parse(kind: Any, line: str) -> Any:
    parser = importlib.import_module("transformers").HfArgumentParser([kind])
    found, unknown = parser.parse_args_into_dataclasses(line.split(), return_remaining_strings=True)
    assert unknown == []
    return found


def ours(args: Any) -> dict[str, Any]:
    return {name: value for name, value in vars(args).items() if name.startswith("sharded_lazy")}


def test_without_the_flag_everything_is_as_before(classes: Any, installed: list[bool], notices: list[str]) -> None:
    args = parse(classes.SftArguments, "--dataset a b#5 c.jsonl --streaming true --data_seed 7")
    assert (args.dataset, args.seen, args.streaming) == (["a", "b#5", "c.jsonl"], ["a", "b#5", "c.jsonl"], True)
    assert (args.of_the_original(), args.template_seen) == (7, True)
    assert ours(args) == DEFAULTS
    assert (installed, notices) == ([], [])


def test_a_forgotten_flag_is_warned_of(
    classes: Any, installed: list[bool], cautions: list[str], tmp_path: Path
) -> None:
    (tmp_path / "stream.json").touch()
    parse(classes.SftArguments, f"--dataset {tmp_path} other.jsonl")
    assert cautions == [
        f"lazyshard: --dataset {tmp_path} is a lazyshard stream, and --sharded_lazy true is missing: ms-swift takes "
        "the directory for one of ordinary data files. Give --sharded_lazy true to read the stream"
    ]
    assert installed == []


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("--sharded_lazy true", {}),
        ("--sharded_lazy", {}),
        ("--sharded-lazy 1", {}),
        ("--sharded_lazy yes --sharded_lazy_samples_per_chunk 1000", {"sharded_lazy_samples_per_chunk": 1000}),
        ("--sharded_lazy true --sharded_lazy_max_wait 30", {"sharded_lazy_max_wait": 30.0}),
        ("--sharded_lazy true --sharded_lazy_max_wait 1e3", {"sharded_lazy_max_wait": 1000.0}),
        ("--sharded_lazy true --sharded_lazy_shuffle_window 0", {"sharded_lazy_shuffle_window": 0}),
        ("--sharded_lazy true --sharded_lazy_shuffle_distance 10000", {"sharded_lazy_shuffle_distance": 10_000}),
        ("--sharded_lazy true --sharded_lazy_unit auto", {"sharded_lazy_unit": "auto"}),
        ("--sharded_lazy true --sharded_lazy_unit 500", {"sharded_lazy_unit": "500"}),
        ("--sharded_lazy true --sharded_lazy_consumer one", {"sharded_lazy_consumer": "one"}),
        ("--sharded_lazy true --sharded_lazy_on_bad_sample raise", {"sharded_lazy_on_bad_sample": "raise"}),
        ("--sharded_lazy true --sharded_lazy_on_end repeat", {"sharded_lazy_on_end": "repeat"}),
        ("--sharded_lazy true --sharded_lazy_take_over true", {"sharded_lazy_take_over": True}),
        (
            "--sharded_lazy true --sharded_lazy_encode_cache /c --sharded_lazy_encode_cache_size 20GB",
            {"sharded_lazy_encode_cache": "/c", "sharded_lazy_encode_cache_size": "20GB"},
        ),
    ],
)
def test_command_line(classes: Any, line: str, expected: dict[str, Any]) -> None:
    args = parse(classes.SftArguments, f"--dataset /one {line}")
    assert ours(args) == {**DEFAULTS, "sharded_lazy": True, **expected}
    assert [type(value) for value in ours(args).values()] == [
        type(value) for value in {**DEFAULTS, "sharded_lazy": True, **expected}.values()
    ]


@pytest.mark.parametrize(
    "line",
    [
        "--sharded_lazy perhaps",
        "--sharded_lazy_on_end halt",
        "--sharded_lazy_on_bad_sample skip",
        "--sharded_lazy_samples_per_chunk many",
        "--sharded_lazy_shuffle_window 1.5",
        "--sharded_lazy_shuffle_distance far",
        "--sharded_lazy_max_wait soon",
    ],
)
def test_wrong_value_is_refused_by_the_parser(classes: Any, line: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parse(classes.SftArguments, line)
    assert ended.value.code == 2
    assert f"argument {line.split()[0]}" in capsys.readouterr().err


def test_help_shows_every_text(classes: Any) -> None:
    parser = importlib.import_module("transformers").HfArgumentParser([classes.SftArguments])
    shown = " ".join(parser.format_help().split())
    for name in DEFAULTS:
        assert f"--{name} " in shown
        field = classes.SftArguments.__dataclass_fields__[name]
        assert len(field.metadata["help"]) > 40
        assert " ".join(field.metadata["help"].split()) in shown
    assert "{stop,repeat}" in shown
    assert "{substitute,raise}" in shown


def test_what_to_skip_is_one_argument_with_spaces_in_it(classes: Any) -> None:
    text = "samples 120:180, chunks 7:8"
    parser = importlib.import_module("transformers").HfArgumentParser([classes.SftArguments])
    (args,) = parser.parse_args_into_dataclasses(
        ["--dataset", "/one", "--sharded_lazy", "true", "--sharded_lazy_skip", text]
    )
    assert args.sharded_lazy_skip == text


def test_class_passes_for_the_original(module: ModuleType) -> None:
    kind = module.DataArguments
    assert (kind.__name__, kind.__qualname__, kind.__module__) == ("DataArguments", "DataArguments", NAME)
    assert kind.__doc__ == "Holds arguments related to data."
    assert repr(kind()).startswith("DataArguments(dataset=[], data_seed=42, ")
    names = [field.name for field in dataclasses.fields(kind)]
    assert names[:2] == ["dataset", "data_seed"]
    assert names[-len(DEFAULTS) :] == list(DEFAULTS)


def test_defaults_that_are_made_are_made_for_each(module: ModuleType) -> None:
    one, two = module.DataArguments(), module.DataArguments()
    one.dataset.append("a")
    assert two.dataset == []


def test_arguments_survive_pickling_and_copying(classes: Any) -> None:
    args = classes.SftArguments(dataset=["/one"], sharded_lazy=True, sharded_lazy_on_end="repeat")
    for again in (pickle.loads(pickle.dumps(args)), copy.deepcopy(args), dataclasses.replace(args)):
        assert type(again) is type(args)
        assert again == args
        assert vars(again)["sharded_lazy_on_end"] == "repeat"
    assert dataclasses.asdict(args)["dataset"] == ["/one"]


def test_second_extension_changes_nothing(module: ModuleType) -> None:
    before = module.DataArguments
    arguments.extend(module)
    assert module.DataArguments is before


def test_module_that_is_loaded_again_is_extended_again(module: ModuleType) -> None:
    before = module.DataArguments
    importlib.reload(module)
    assert "sharded_lazy" not in module.DataArguments.__dataclass_fields__
    arguments.extend(module)
    assert module.DataArguments is not before
    args = module.DataArguments(dataset=["a"], sharded_lazy_max_wait=1.0)
    assert [field.name for field in dataclasses.fields(args)].count("sharded_lazy") == 1
    assert args.seen == ["a"]


def test_module_without_the_class_is_refused() -> None:
    module = ModuleType("empty")
    with pytest.raises(AttributeError) as refused:
        arguments.extend(module)
    assert (refused.value.obj, refused.value.name) == (module, "DataArguments")


def test_commands_that_do_not_train_put_the_flag_aside(classes: Any, installed: list[bool], notices: list[str]) -> None:
    args = parse(classes.InferArguments, "--dataset a b --sharded_lazy true")
    assert (args.sharded_lazy, args.dataset, args.seen) == (False, ["a", "b"], ["a", "b"])
    assert installed == []
    assert len(notices) == 1
    assert "--sharded_lazy is for commands that train" in notices[0]


def test_errors_have_their_codes_before_the_first_check(classes: Any, installed: list[bool]) -> None:
    with pytest.raises(SettingsRefused, match="leave out --streaming"):
        parse(classes.SftArguments, "--dataset a --sharded_lazy true --streaming true")
    assert installed == [True]


@pytest.mark.parametrize("version", ["2.6.1", "3.12.6"])
def test_ms_swift_that_is_too_old_refuses_the_flag_and_nothing_else(
    classes: Any, installed: list[bool], monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    monkeypatch.setattr(ms_swift, "version", lambda: version)
    assert parse(classes.SftArguments, "--dataset a --max_length 9").seen == ["a"]
    with pytest.raises(SettingsRefused) as refused:
        parse(classes.SftArguments, "--dataset stream --sharded_lazy true --max_length 9")
    assert refused.value.argument == "sharded_lazy"
    assert all(words in str(refused.value) for words in (version, "4.0.0", "pip install"))
    assert errors.code_of(refused.value) == errors.REFUSED
    assert installed == [True]


def test_refusal_comes_before_ms_swift_looks_at_anything(classes: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[Any] = []
    monkeypatch.setattr(classes.BaseArguments.__mro__[3], "__post_init__", looked.append)
    with pytest.raises(SettingsRefused, match="one stream is given twice"):
        parse(classes.SftArguments, "--dataset a a --sharded_lazy true")
    assert looked == []


@pytest.mark.parametrize("given", ["stream", "./stream", "../here/stream", "stream/"])
def test_directory_becomes_absolute(classes: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    args = classes.SftArguments(dataset=[given], sharded_lazy=True)
    assert args.dataset == args.seen == [str(tmp_path / "here" / "stream")]


def test_directories_of_a_blend_become_absolute(classes: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    args = classes.SftArguments(dataset=["one", "two"], sharded_lazy=True)
    assert args.dataset == args.seen == [str(tmp_path / "one"), str(tmp_path / "two")]


def test_home_and_a_single_name_are_understood(classes: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home")
    assert classes.SftArguments(dataset="~/stream", sharded_lazy=True).dataset == ["/home/stream"]


@pytest.mark.parametrize("name", ["~/a.jsonl", "~/a#b"])
def test_home_is_understood_before_the_directory_is_looked_at(
    classes: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "a.jsonl").write_text("{}\n")
    (tmp_path / "a#b").mkdir()
    if name == "~/a#b":
        assert classes.SftArguments(dataset=[name], sharded_lazy=True).dataset == [os.path.expanduser(name)]
        return
    with pytest.raises(SettingsRefused, match="is a file"):
        classes.SftArguments(dataset=[name], sharded_lazy=True)


def test_arguments_that_are_checked_again_stay_the_same(classes: Any) -> None:
    # ms-swift makes arguments of arguments, of checkpoints' args.json for instance.
    args = classes.SftArguments(dataset=["/one"], sharded_lazy=True)
    args.__post_init__()
    assert args.dataset == ["/one"]
