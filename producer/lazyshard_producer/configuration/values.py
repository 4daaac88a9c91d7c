"""An option as a field of settings, and how its value is written: the types by which pydantic reads it.

pydantic itself is imported where a value is read, not for the help.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import MISSING, dataclass, field
from typing import Annotated, Any, Final, Literal

from annotated_types import Ge, Gt, Interval

from lazyshard_producer.configuration.quantities import (
    AMOUNT,
    MAX_AMOUNT,
    RETAIN,
    SIZE,
    Amount,
    parse_amount,
    parse_bytes,
    parse_retain,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """What an option is besides its type and default: from it flags, TOML keys, help and example are made.

    Attributes:
        metavar: what stands for the value in the help.
        help: what it does, in a sentence or two; ends with its default where it has one.
        example: a value in TOML, for the example file.
        table: the TOML table it belongs to: "" for the top of the file, "source" for each ``[[source]]``.
        needs: the field without which it means nothing.
        name: its TOML key, where that is not the field's name.
        repeat: whether its flag may be given several times.
        reload: whether it may change while a run goes on.
    """

    metavar: str
    help: str
    example: str
    table: str = ""
    needs: str | None = None
    name: str = ""
    repeat: bool = False
    reload: bool = False


def option(metavar: str, help: str, example: str, default: Any = ..., **more: Any) -> Any:
    """Returns the field of an option; without a default it has to be given."""
    about = Option(metavar=metavar, help=help, example=example, **more)
    return field(default=MISSING if default is ... else default, metadata={"option": about})


class Written:
    """Metadata of a field whose value is written otherwise than pydantic knows: `read` makes it of what was given.

    That is a TOML value, the text behind a flag, or the tuple of the texts of a flag that may be repeated. It raises
    ValueError with what is expected.
    """

    def __init__(self, read: Callable[[Any], Any]) -> None:
        self._read = read

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> Any:
        """Returns pydantic's schema of the type, with `read` before it."""
        from pydantic_core import core_schema

        return core_schema.no_info_before_validator_function(self._read, handler(source))


def _quantity(parse: Callable[[str], Any], expected: str) -> Written:
    def read(value: Any) -> Any:
        if type(value) not in (str, int):
            raise ValueError(expected)
        return parse(str(value))

    return Written(read)


def _read_whole(value: Any) -> Any:
    # To pydantic the text 5.0 is a whole number.
    if isinstance(value, str) and "." in value:
        raise ValueError("a whole number")
    return value


def _split_names(value: Any) -> Any:
    return [name.strip() for text in value for name in text.split(",")] if isinstance(value, tuple) else value


def _read_names(value: Any) -> tuple[Any, ...]:
    value = _split_names(value)
    return tuple(value) if isinstance(value, list) else (value,)


def _read_columns(value: Any) -> Any:
    if isinstance(value, tuple):
        parts = (name.partition("=") for name in _split_names(value))
        return tuple((new.strip(), old.strip() if equals else new) for new, equals, old in parts)
    if isinstance(value, list):
        return tuple((name, name) for name in value)
    if not isinstance(value, dict):
        raise ValueError("names of columns as NEW=OLD")
    return tuple(value.items())


def _read_pairs(value: Any) -> Any:
    if isinstance(value, tuple) and all("=" in text for text in value):
        pairs = (text.partition("=") for text in value)
        return tuple((name.strip(), item) for name, _, item in pairs)
    if not isinstance(value, dict) or not all(type(item) in (str, int, float, bool) for item in value.values()):
        raise ValueError("settings as NAME=VALUE")
    return tuple((name, str(item).lower() if type(item) is bool else str(item)) for name, item in value.items())


OR_NONE: Final = Written(lambda value: None if value == "none" else value)
"""Of a value that may be "none": no limit, also where a configuration file sets one."""

Whole = Annotated[int, Written(_read_whole)]
FromZero = Annotated[Whole, Interval(ge=0, le=MAX_AMOUNT)]
FromOne = Annotated[Whole, Interval(ge=1, le=MAX_AMOUNT)]
Positive = Annotated[float, Gt(0)]
NotNegative = Annotated[float, Ge(0)]
Bytes = Annotated[int, Interval(ge=1, le=MAX_AMOUNT), _quantity(parse_bytes, SIZE)]
BytesFromZero = Annotated[int, Interval(ge=0, le=MAX_AMOUNT), _quantity(parse_bytes, SIZE)]
AheadAmount = Annotated[Amount, _quantity(parse_amount, AMOUNT)]
Retain = Annotated[Literal["all", "consumed"] | int, _quantity(parse_retain, RETAIN)]
Names = Annotated[tuple[str, ...], Written(_read_names)]
Columns = Annotated[tuple[tuple[str, str], ...], Written(_read_columns)]
Pairs = Annotated[tuple[tuple[str, str], ...], Written(_read_pairs)]
