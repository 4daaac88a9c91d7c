"""`arguments`: our fields in a class of ms-swift's shape, through the parser that ms-swift uses."""

from __future__ import annotations

import dataclasses
import importlib
import shlex
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from lazyshard_swift import arguments
from lazyshard_swift.errors import SettingsRefused
from tests.swift.unit.runs import DEFAULTS, refused

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


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Calls of `install_exits`, which are not let through."""
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


@pytest.fixture
def module(classes: Any) -> ModuleType:
    """The module with the class, extended."""
    return sys.modules[NAME]


def parse(kind: Any, line: str) -> Any:
    parser = importlib.import_module("transformers").HfArgumentParser([kind])
    found, unknown = parser.parse_args_into_dataclasses(shlex.split(line), return_remaining_strings=True)
    assert unknown == []
    return found


def ours(args: Any) -> dict[str, Any]:
    return {name: value for name, value in vars(args).items() if name.startswith("sharded_lazy")}


def test_without_the_flag_everything_is_as_before(classes: Any, installed: list[bool], notices: list[str]) -> None:
    args = parse(classes.SftArguments, "--dataset a b#5 c.jsonl --streaming true --data_seed 7")
    assert args.dataset == args.seen == ["a", "b#5", "c.jsonl"]
    assert (args.streaming, args.of_the_original(), args.template_seen) == (True, 7, True)
    assert ours(args) == DEFAULTS
    assert (installed, notices) == ([], [])


def test_a_forgotten_flag_is_warned_of(classes: Any, cautions: list[str], tmp_path: Path) -> None:
    (tmp_path / "stream.json").touch()
    parse(classes.SftArguments, f"--dataset {tmp_path} other.jsonl")
    assert len(cautions) == 1 and f"--dataset {tmp_path} " in cautions[0] and "--sharded_lazy true" in cautions[0]


COMMAND_LINES: list[tuple[str, dict[str, Any]]] = [
    ("", {}),
    ("_samples_per_chunk 1000 --sharded_lazy_max_wait 30", {"samples_per_chunk": 1000, "max_wait": 30.0}),
    ("_max_wait 1e3 --sharded_lazy_shuffle_window 0", {"max_wait": 1000.0, "shuffle_window": 0}),
    ("_shuffle_distance 10000 --sharded_lazy_unit auto", {"shuffle_distance": 10_000, "unit": "auto"}),
    ("_unit 500 --sharded_lazy_consumer one", {"unit": "500", "consumer": "one"}),
    ("_on_bad_sample raise --sharded_lazy_on_end repeat", {"on_bad_sample": "raise", "on_end": "repeat"}),
    ("_take_over true", {"take_over": True}),
    ("_encode_cache /c --sharded_lazy_encode_cache_size 9GB", {"encode_cache": "/c", "encode_cache_size": "9GB"}),
    ("_skip 'samples 120:180, chunks 7:8'", {"skip": "samples 120:180, chunks 7:8"}),
]


def test_command_line(classes: Any) -> None:
    for line, expected in COMMAND_LINES:
        whole = DEFAULTS | {"sharded_lazy": True} | {f"sharded_lazy_{name}": value for name, value in expected.items()}
        for flag in ("--sharded_lazy true", "--sharded_lazy", "--sharded-lazy 1", "--sharded_lazy yes"):
            args = parse(classes.SftArguments, f"--dataset /one {flag}" + (f" --sharded_lazy{line}" if line else ""))
            assert ours(args) == whole
            assert list(map(type, ours(args).values())) == list(map(type, whole.values()))


def test_wrong_value_is_refused_by_the_parser(classes: Any) -> None:
    for line in (
        *(" perhaps", "_on_end halt", "_on_bad_sample skip", "_samples_per_chunk many"),
        *("_shuffle_window 1.5", "_shuffle_distance far", "_max_wait soon"),
    ):
        with pytest.raises(SystemExit) as ended:
            parse(classes.SftArguments, f"--sharded_lazy{line}")
        assert ended.value.code == 2


def test_help_shows_every_text(classes: Any) -> None:
    parser = importlib.import_module("transformers").HfArgumentParser([classes.SftArguments])
    shown = " ".join(parser.format_help().split())
    for name in DEFAULTS:
        text = classes.SftArguments.__dataclass_fields__[name].metadata["help"]
        assert f"--{name} " in shown and " ".join(text.split()) in shown
    assert "{stop,repeat}" in shown and "{substitute,raise}" in shown


def test_class_passes_for_the_original(module: ModuleType) -> None:
    kind = module.DataArguments
    assert (kind.__name__, kind.__qualname__, kind.__module__) == ("DataArguments", "DataArguments", NAME)
    assert kind.__doc__ == "Holds arguments related to data."
    names = [field.name for field in dataclasses.fields(kind)]
    assert names[:2] == ["dataset", "data_seed"]
    assert names[-len(DEFAULTS) :] == list(DEFAULTS)
    # Defaults that are made are made for each.
    one, two = kind(), kind()
    one.dataset.append("a")
    assert two.dataset == []


def test_module_that_is_loaded_again_is_extended_again_and_else_once(module: ModuleType) -> None:
    before = module.DataArguments
    arguments.extend(module)
    assert module.DataArguments is before
    importlib.reload(module)
    assert "sharded_lazy" not in module.DataArguments.__dataclass_fields__
    arguments.extend(module)
    args = module.DataArguments(dataset=["a"], sharded_lazy_max_wait=1.0)
    assert [field.name for field in dataclasses.fields(args)].count("sharded_lazy") == 1
    assert args.seen == ["a"]
    empty = ModuleType("empty")
    with refused(AttributeError, obj=empty, name="DataArguments"):
        arguments.extend(empty)


def test_commands_that_do_not_train_put_the_flag_aside(classes: Any, installed: list[bool], notices: list[str]) -> None:
    args = parse(classes.InferArguments, "--dataset a b --sharded_lazy true")
    assert (args.sharded_lazy, args.dataset, args.seen) == (False, ["a", "b"], ["a", "b"])
    assert installed == []
    assert len(notices) == 1


def test_refusal_comes_before_ms_swift_looks_at_anything(
    classes: Any, installed: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    looked: list[Any] = []
    monkeypatch.setattr(classes.BaseArguments.__mro__[3], "__post_init__", looked.append)
    with refused(SettingsRefused, argument="streaming"):
        parse(classes.SftArguments, "--dataset a --sharded_lazy true --streaming true")
    # Errors have their exit codes before the first check.
    assert (looked, installed) == ([], [True])


@pytest.mark.parametrize(
    ("given", "found"),
    [
        *(([name], ["here/stream"]) for name in ("stream", "./stream", "../here/stream", "stream/")),
        (["one", "two"], ["here/one", "here/two"]),
        ("~/stream", ["stream"]),
        (["~/a#b"], ["a#b"]),
    ],
)
def test_directories_become_absolute(
    classes: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: Any, found: list[str]
) -> None:
    (tmp_path / "here").mkdir()
    (tmp_path / "a#b").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("HOME", str(tmp_path))
    args = classes.SftArguments(dataset=given, sharded_lazy=True)
    assert args.dataset == args.seen == [str(tmp_path / name) for name in found]
    # ms-swift makes arguments of arguments, of checkpoints' args.json for instance.
    args.__post_init__()
    assert args.dataset == args.seen
    (tmp_path / "a.jsonl").write_text("{}\n")
    with refused(SettingsRefused, argument="dataset"):
        classes.SftArguments(dataset=["~/a.jsonl"], sharded_lazy=True)
