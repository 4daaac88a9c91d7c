import copy
import inspect
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lazyshard import errors
from lazyshard.errors import ChunkCorrupt, LazyShardError, RowInvalid, WaitTimeout
from tests.tiers import full

MARK = "lazyshard-error-fields"

CLASSES = [value for value in vars(errors).values() if inspect.isclass(value) and issubclass(value, LazyShardError)]
REFINED = [cls for cls in CLASSES if cls is not LazyShardError]
every_class = pytest.mark.parametrize("cls", CLASSES)

VALUES = {"int": 7, "float": 1.5, "str": "a\nb 'ü\u2028' \ud800"}
"""A value for a field of each type: text with all that could break a line of a traceback."""


def declared(cls: type[LazyShardError]) -> dict[str, str]:
    return {name: str(kind) for base in cls.__mro__ for name, kind in vars(base).get("__annotations__", {}).items()}


def filled(cls: type[LazyShardError]) -> tuple[LazyShardError, dict[str, Any]]:
    fields = {name: VALUES[kind.removesuffix(" | None")] for name, kind in declared(cls).items()}
    return cls("first line\nsecond line", **fields), fields


def check(error: BaseException, cls: type[LazyShardError], fields: dict[str, Any]) -> None:
    assert type(error) is cls
    assert {name: getattr(error, name) for name in fields} == fields
    assert MARK not in str(error)


BUILTINS = {
    "ConnectionError": "StoreUnavailable",
    "FileNotFoundError": "ChunkMissing ChunkRetired StreamMissing",
    "OSError": "FileRefused WriterFailed",
    "PermissionError": "AccessRefused",
    "RuntimeError": "CursorTaken ProducerFenced",
    "TimeoutError": "WaitTimeout",
    "TypeError": "LengthUnknown",
    "ValueError": "BadSample ChunkCorrupt ConfigInvalid FileInvalid FormatInvalid RowInvalid SkipSample "
    "StateInvalid StateMismatch StreamEnded StreamInvalid StreamMismatch VersionUnsupported",
}


def test_errors_that_users_may_catch_are_all_there() -> None:
    found: dict[str, set[str]] = {}
    for cls in REFINED:
        refined = next(base.__name__ for base in cls.__mro__ if base.__module__ == "builtins")
        found.setdefault(refined, set()).add(cls.__name__)
    assert found == {name: set(classes.split()) for name, classes in BUILTINS.items()}
    assert issubclass(errors.LengthUnknown, ValueError)
    assert all(cls.__doc__ for cls in CLASSES)


@every_class
def test_fields_that_do_not_apply_are_none(cls: type[LazyShardError]) -> None:
    error = cls("text")
    assert (str(error), str(cls())) == ("text", "")
    assert [getattr(error, name) for name in declared(cls)] == [None] * len(declared(cls))
    for name in ("nosuch", "args", "carry_fields", "with_traceback", "__doc__", "_fields", "errno"):
        with pytest.raises(TypeError):
            cls("text", **{name: 1})


@every_class
def test_error_survives_pickling_and_copying(cls: type[LazyShardError]) -> None:
    error, fields = filled(cls)
    pickled = [pickle.loads(pickle.dumps(error, protocol)) for protocol in range(pickle.HIGHEST_PROTOCOL + 1)]
    for found in (error, *pickled, copy.copy(error), copy.deepcopy(error)):
        check(found, cls, fields)
        assert (str(found), found.args) == ("first line\nsecond line", ("first line\nsecond line",))
    for name in fields:  # One that was set later too
        setattr(error, name, None)
    check(pickle.loads(pickle.dumps(error)), cls, dict.fromkeys(fields))


@every_class
def test_fields_are_carried_by_text_alone(cls: type[LazyShardError]) -> None:
    error, fields = filled(cls)
    error.carry_fields()
    once = str(error)
    text = f"Caught {cls.__name__}.\nTraceback:\n  File\nlazyshard.errors.{cls.__name__}: {{}}\n"
    found = cls(text.format(error))
    check(found, cls, fields)
    assert str(found) == text.format("first line\nsecond line")
    error.carry_fields()  # Carried twice they are carried once, and pickled without the mark
    assert str(error) == once
    assert once.count(MARK) == 1
    check(cls(once), cls, fields)
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
    # Nor where the error has carried none.
    unknown = errors.LengthUnknown(f"ChunkCorrupt: {cause}\n\nLengthUnknown: text\n")
    assert (unknown.directory, unknown.chunk, unknown.file) == (None, None, None)


@pytest.mark.parametrize(
    "text", ["{}: ", "{}: {{", "{}: {{}} and", "{}: {{no json}}", "'{}: {{}}' in it", "a\n{}: [1]"]
)
def test_text_that_only_looks_like_carried_fields_is_left(text: str) -> None:
    text = text.format(MARK)
    assert str(RowInvalid(text)) == text
    error = RowInvalid(text, byte=3)
    error.carry_fields()
    assert RowInvalid(str(error)).byte == 3


def test_numpy_numbers_are_carried_as_numbers() -> None:
    error = ChunkCorrupt("text", chunk=np.uint64(3), byte=np.int64(4), actual=Path("x"))
    error.carry_fields()
    found = ChunkCorrupt(str(error))
    assert (found.chunk, found.byte, found.actual) == (3, 4, "x")
    assert type(found.chunk) is int
    late = WaitTimeout("text", waited=float("inf"))
    late.carry_fields()
    assert WaitTimeout(str(late)).waited == float("inf")


class Refusing:  # A data set of which every sample is refused, as in a worker of ours; at module level, for spawn
    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> dict[str, Any]:
        file = "chunk_00003.jsonl"
        error = ChunkCorrupt(f"{file}: damaged", file=file, chunk=3, row=index, expected="a", actual="ü\n")
        error.carry_fields()
        raise error


@pytest.mark.parametrize("method", ["fork", *full("spawn")])
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded, use of fork:DeprecationWarning")
def test_error_of_a_data_loader_worker_arrives_whole(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    data = pytest.importorskip("torch.utils.data")
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1]))  # From where the worker imports this module
    loader = data.DataLoader(Refusing(), batch_size=None, num_workers=1, multiprocessing_context=method)
    with pytest.raises(LazyShardError) as caught:
        next(iter(loader))
    fields = {"file": "chunk_00003.jsonl", "chunk": 3, "row": 0, "byte": None, "expected": "a", "actual": "ü\n"}
    check(caught.value, ChunkCorrupt, fields)
    assert "chunk_00003.jsonl: damaged" in str(caught.value)
