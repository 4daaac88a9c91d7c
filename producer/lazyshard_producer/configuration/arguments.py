"""The command line's sources: several files after one --source, and the weight that belongs to the source before it.

    run --source a b --weight 0.7 --follow c --weight 0.3
        |---- 0.7 for both -----| |------- 0.3 --------|

They are taken out before the rest is parsed, since to a parser each option has a place of its own, and none another.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from lazyshard_producer.errors import Problem

COMMANDS: Final = ("run", "check")
"""Those that take sources."""

_SOURCES: Final = ("--source", "--follow")
_WEIGHT: Final = "--weight"


@dataclass(slots=True)
class SourceArgument:
    """One --source or --follow with what belongs to it.

    Attributes:
        flag: which of the two.
        paths: what follows it.
        weights: what follows each --weight after it; at most one makes sense.
    """

    flag: str
    paths: list[str] = field(default_factory=list)
    weights: list[str] = field(default_factory=list)


@dataclass(slots=True)
class Sorted:
    """A command line taken apart.

    Attributes:
        rest: the arguments that have nothing to do with sources.
        sources: the sources, in order.
        problems: what cannot be about them.
    """

    rest: list[str] = field(default_factory=list)
    sources: list[SourceArgument] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)


def sort_arguments(arguments: Sequence[str]) -> Sorted:
    """Takes the sources out of a command line.

    >>> sort_arguments(["run", "--source", "a", "b", "--weight", "2", "--out", "c"]).rest
    ['run', '--out', 'c']
    """
    result = Sorted()
    if not arguments or arguments[0] not in COMMANDS:
        result.rest = list(arguments)
        return result
    open_source: SourceArgument | None = None  # takes files that follow
    left = iter(arguments)
    for argument in left:
        flag, equals, value = argument.partition("=")
        if flag in _SOURCES:
            source = SourceArgument(flag, [value] if equals else [])
            result.sources.append(source)
            open_source = None if equals else source
        elif flag == _WEIGHT:
            _take_weight(result, value if equals else next(left, None))
            open_source = None
        elif argument == "--":
            result.rest += [argument, *left]
        elif open_source is not None and _is_path(argument):
            open_source.paths.append(argument)
        else:
            open_source = None
            result.rest.append(argument)
    for source in result.sources:
        if not source.paths:
            result.problems.append(Problem(source.flag, "a path is needed behind it, got none"))
    return result


def _take_weight(result: Sorted, value: str | None) -> None:
    if value is None:
        result.problems.append(Problem(_WEIGHT, "a number is needed behind it, got none"))
    elif not result.sources:
        result.problems.append(Problem(_WEIGHT, f"it belongs behind the --source that it is for, got {value} first"))
    else:
        source = result.sources[-1]
        source.weights.append(value)
        if len(source.weights) == 2:
            shown = " ".join([source.flag, *source.paths])
            result.problems.append(Problem(_WEIGHT, f"one for each --source or --follow, got two behind {shown}"))


def _is_path(argument: str) -> bool:
    return argument == "-" or not argument.startswith("-")
