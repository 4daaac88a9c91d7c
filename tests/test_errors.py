from __future__ import annotations

import builtins
import copy
import inspect
import multiprocessing
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lazyshard import errors
from lazyshard.errors import ChunkCorrupt, LazyShardError, RowInvalid, WaitTimeout

MARK = "lazyshard-error-fields"

CLASSES = [value for value in vars(errors).values() if inspect.isclass(value) and issubclass(value, LazyShardError)]
REFINED = [cls for cls in CLASSES if cls is not LazyShardError]
every_class = pytest.mark.parametrize("cls", CLASSES)

VALUES = {"int": 7, "float": 1.5, "str": "a\nb 'ü\u2028' \ud800"}
"""A value for a field of each type: text with all that could break a line of a traceback."""


def declared(cls: type[LazyShardError]) -> dict[str, str]:
    """The type, as written, of each field of a class."""
    return {name: str(kind) for base in cls.__mro__ for name, kind in vars(base).get("__annotations__", {}).items()}


def filled(cls: type[LazyShardError]) -> tuple[LazyShardError, dict[str, Any]]:
    """An error with a value in every field."""
    fields = {name: VALUES[kind.removesuffix(" | None")] for name, kind in declared(cls).items()}
    return cls("first line\nsecond line", **fields), fields


def check(error: BaseException, cls: type[LazyShardError], fields: dict[str, Any]) -> None:
    assert type(error) is cls
    assert {name: getattr(error, name) for name in fields} == fields
    assert MARK not in str(error)


def test_errors_that_users_may_catch_are_all_there() -> None:
    assert {
        cls.__name__: next(base.__name__ for base in cls.__mro__ if base.__module__ == "builtins") for cls in REFINED
    } == {
        "BadSample": "ValueError",
        "ChunkCorrupt": "ValueError",
        "ChunkMissing": "FileNotFoundError",
        "ChunkRetired": "FileNotFoundError",
        "ConfigInvalid": "ValueError",
        "CursorTaken": "RuntimeError",
        "CursorUnwritable": "OSError",
        "ExportExists": "FileExistsError",
        "FileInvalid": "ValueError",
        "FileRefused": "OSError",
        "FileUnreadable": "PermissionError",
        "FormatInvalid": "ValueError",
        "IndexedInvalid": "ValueError",
        "LengthUnknown": "TypeError",
        "LengthsMissing": "ValueError",
        "NothingKept": "ValueError",
        "ProducerFenced": "RuntimeError",
        "ProducerLocked": "BlockingIOError",
        "RankInvalid": "ValueError",
        "RowInvalid": "ValueError",
        "SealInvalid": "ValueError",
        "SkipSample": "ValueError",
        "StateInvalid": "ValueError",
        "StateMismatch": "ValueError",
        "StepInvalid": "ValueError",
        "StreamEnded": "ValueError",
        "StreamInvalid": "ValueError",
        "StreamMismatch": "ValueError",
        "StoreRefused": "OSError",
        "StoreUnavailable": "ConnectionError",
        "StreamMissing": "FileNotFoundError",
        "StreamUnsealed": "ValueError",
        "TooManyBadSamples": "ValueError",
        "VersionUnsupported": "ValueError",
        "WaitTimeout": "TimeoutError",
        "WriterFailed": "OSError",
    }


@every_class
def test_error_extends_the_root_and_a_builtin(cls: type[LazyShardError]) -> None:
    assert issubclass(cls, LazyShardError)
    refined = [base for base in cls.__mro__ if vars(builtins).get(base.__name__) is base]
    assert refined[:-3] or cls is LazyShardError  # besides Exception, BaseException and object
    assert cls.__doc__


@every_class
def test_fields_that_do_not_apply_are_none(cls: type[LazyShardError]) -> None:
    error = cls("text")
    assert str(error) == "text"
    assert [getattr(error, name) for name in declared(cls)] == [None] * len(declared(cls))
    assert str(cls()) == ""


@every_class
def test_fields_and_message_are_kept(cls: type[LazyShardError]) -> None:
    error, fields = filled(cls)
    check(error, cls, fields)
    assert error.args == ("first line\nsecond line",)
    assert str(error) == "first line\nsecond line"


@every_class
@pytest.mark.parametrize("name", ["nosuch", "args", "carry_fields", "with_traceback", "__doc__", "_fields", "errno"])
def test_unknown_field_is_a_type_error(cls: type[LazyShardError], name: str) -> None:
    with pytest.raises(TypeError, match=rf"^{cls.__name__} has no field '{name}'$"):
        cls("text", **{name: 1})


@every_class
@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_error_survives_pickling(cls: type[LazyShardError], protocol: int) -> None:
    error, fields = filled(cls)
    found = pickle.loads(pickle.dumps(error, protocol))
    check(found, cls, fields)
    assert (str(found), found.args) == (str(error), error.args)


@every_class
def test_error_survives_copying(cls: type[LazyShardError]) -> None:
    error, fields = filled(cls)
    for found in (copy.copy(error), copy.deepcopy(error)):
        check(found, cls, fields)
        assert str(found) == str(error)


def test_field_set_later_survives_pickling() -> None:
    error = RowInvalid("text", byte=3)
    error.file = "a.jsonl"
    found = pickle.loads(pickle.dumps(error))
    assert (found.file, found.byte, found.line) == ("a.jsonl", 3, None)


@every_class
def test_fields_are_carried_by_text_alone(cls: type[LazyShardError]) -> None:
    error, fields = filled(cls)
    error.carry_fields()
    text = f"Caught {cls.__name__}.\nTraceback:\n  File\nlazyshard.errors.{cls.__name__}: {error}\n"
    found = cls(text)
    check(found, cls, fields)
    assert str(found) == (
        f"Caught {cls.__name__}.\nTraceback:\n  File\nlazyshard.errors.{cls.__name__}: first line\nsecond line\n"
    )


@every_class
def test_fields_carried_twice_are_carried_once(cls: type[LazyShardError]) -> None:
    error, fields = filled(cls)
    error.carry_fields()
    once = str(error)
    error.carry_fields()
    assert str(error) == once
    assert once.count(MARK) == 1
    check(cls(once), cls, fields)


@every_class
def test_error_that_carries_its_fields_survives_pickling_without_the_mark(cls: type[LazyShardError]) -> None:
    error, fields = filled(cls)
    error.carry_fields()
    found = pickle.loads(pickle.dumps(error))
    check(found, cls, fields)
    assert str(found) == "first line\nsecond line"


def test_fields_of_the_cause_are_not_taken_for_those_of_the_error() -> None:
    cause = ChunkCorrupt("cause", file="cause.jsonl", chunk=1, expected="x")
    cause.carry_fields()
    for error in (RowInvalid("text", file="row.jsonl"), RowInvalid("text")):
        file = error.file
        error.carry_fields()
        found = RowInvalid(f"ChunkCorrupt: {cause}\n\nThe above exception …\n\nRowInvalid: {error}\n")
        assert (found.file, found.line) == (file, None)
        assert str(found) == "ChunkCorrupt: cause\n\nThe above exception …\n\nRowInvalid: text\n"


def test_fields_of_the_cause_that_the_error_lacks_are_dropped() -> None:
    cause = ChunkCorrupt("cause", chunk=1)
    cause.carry_fields()
    found = errors.LengthUnknown(f"ChunkCorrupt: {cause}\n\nLengthUnknown: text\n")
    assert (found.directory, hasattr(found, "chunk")) == (None, False)


@pytest.mark.parametrize(
    "text",
    [
        f"{MARK}: ",
        f"{MARK}: {{",
        f"{MARK}: {{}} and more",
        f"{MARK}: {{not json}}",
        f"found '{MARK}: {{}}' in a row",
        f"a\n{MARK}: [1]",
    ],
)
def test_text_that_only_looks_like_carried_fields_is_left(text: str) -> None:
    assert str(RowInvalid(text)) == text
    error = RowInvalid(text, byte=3)
    assert str(error) == text
    error.carry_fields()
    assert RowInvalid(str(error)).byte == 3


def test_numpy_numbers_are_carried_as_numbers() -> None:
    error = ChunkCorrupt("text", chunk=np.uint64(3), byte=np.int64(4), actual=Path("x"))
    error.carry_fields()
    found = ChunkCorrupt(str(error))
    assert (found.chunk, found.byte, found.actual) == (3, 4, "x")
    assert type(found.chunk) is int


def test_infinite_field_is_carried() -> None:
    error = WaitTimeout("text", waited=float("inf"))
    error.carry_fields()
    assert WaitTimeout(str(error)).waited == float("inf")


def test_errors_import_nothing_of_lazyshard() -> None:
    source = Path(errors.__file__).read_text(encoding="utf-8")
    assert "import lazyshard" not in source
    assert "from lazyshard" not in source


@every_class
def test_error_survives_the_exception_wrapper_of_torch(cls: type[LazyShardError]) -> None:
    wrapper = pytest.importorskip("torch._utils").ExceptionWrapper
    error, fields = filled(cls)
    try:
        try:
            raise ValueError("a cause")
        except ValueError as cause:
            error.carry_fields()
            raise error from cause
    except LazyShardError:
        wrapped = wrapper(where="in DataLoader worker process 0")
    with pytest.raises(LazyShardError) as caught:
        pickle.loads(pickle.dumps(wrapped)).reraise()
    check(caught.value, cls, fields)
    assert str(caught.value).startswith(f"Caught {cls.__name__} in DataLoader worker process 0.\n")
    assert str(caught.value).endswith(f"{cls.__name__}: first line\nsecond line\n")


class Refusing:
    """A data set of which every sample is refused, as in a worker of ours; at module level, for spawn."""

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> dict[str, Any]:
        error = ChunkCorrupt(
            "chunk_00003.jsonl: damaged", file="chunk_00003.jsonl", chunk=3, row=index, expected="a", actual="ü\n"
        )
        error.carry_fields()
        raise error


@pytest.mark.parametrize("method", ["fork", "spawn"])
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded, use of fork:DeprecationWarning")
def test_error_of_a_data_loader_worker_arrives_whole(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    data = pytest.importorskip("torch.utils.data")
    # What the spawned worker imports this module from, however pytest was started.
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1]))
    loader = data.DataLoader(
        Refusing(), batch_size=None, num_workers=1, multiprocessing_context=multiprocessing.get_context(method)
    )
    with pytest.raises(LazyShardError) as caught:
        next(iter(loader))
    fields = {"file": "chunk_00003.jsonl", "chunk": 3, "row": 0, "byte": None, "expected": "a", "actual": "ü\n"}
    check(caught.value, ChunkCorrupt, fields)
    assert isinstance(caught.value, ValueError)
    assert "chunk_00003.jsonl: damaged" in str(caught.value)


def test_uncaught_error_shows_message_and_class(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("from lazyshard.errors import RowInvalid\nraise RowInvalid('a row', byte=3)\n")
    root = str(Path(__file__).parents[1])
    run = subprocess.run(
        [sys.executable, str(script)], env={"PYTHONPATH": root}, capture_output=True, text=True, check=False, timeout=60
    )
    assert run.returncode == 1
    assert run.stderr.splitlines()[-1] == "lazyshard.errors.RowInvalid: a row"
