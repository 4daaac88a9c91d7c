"""The command line: the options as typer takes them, and sources, which are taken out before the rest is parsed.

Several files may follow one --source, and a weight belongs to the source before it:

    run --source a b --weight 0.7 --follow c --weight 0.3
        |---- 0.7 for both -----| |------- 0.3 --------|

To a parser each option has a place of its own, and none another.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Final

import typer

from lazyshard_producer.configuration.settings import OPTIONS, PANELS, SOURCE_OPTIONS, Described
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


@dataclass(frozen=True, slots=True)
class Flags:
    """What the command line says.

    Attributes:
        sources: each --source and --follow, in order.
        values: the texts behind each other flag, by name of option; of those that were given.
        problems: what cannot be about the sources.
    """

    sources: Sequence[SourceArgument] = ()
    values: Mapping[str, Sequence[str]] = field(default_factory=dict)
    problems: Sequence[Problem] = ()


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


_SOURCE_HELP: Final = (
    "Where rows come from: JSON lines (.gz and .zst too), Parquet, Arrow, the directory of a Hugging Face data set, a "
    "stream (a directory with stream.json, or with chunk files and their .completed markers; a URL), - for "
    "standard input, a named pipe, python:MODULE:FUNCTION (which runs that code, with all rights of this command), "
    "PREFIX.idx or megatron:PREFIX for Megatron's IndexedDataset, megatron-blend:FILE for a file of such prefixes. "
    "Repeat it, or give several files after it, or a quoted pattern; they are read in this order."
)

_FOLLOW_HELP: Final = "A directory into which other programs write files: takes them as they are completed."


def with_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the command with a parameter for each option; it takes them as keywords, by name, None if not given.

    A command's own parameters come first.
    """
    own = [
        parameter
        for parameter in inspect.signature(command, eval_str=True).parameters.values()
        if parameter.kind is not parameter.VAR_KEYWORD
    ]
    sources = (
        _parameter("source", "--source", list[str] | None, "FILE...", _SOURCE_HELP, "source"),
        _parameter("follow", "--follow", list[str] | None, "DIRECTORY", _FOLLOW_HELP, "source"),
    )
    parameters = [*own, *sources, *map(_of_option, (*SOURCE_OPTIONS, *OPTIONS))]
    keywords = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in parameters]

    def taking_options(**given: Any) -> Any:
        return command(**given)

    # What typer asks for. A wrapper of functools would lead it to the signature of `command`.
    taking_options.__signature__ = inspect.Signature(keywords)  # type: ignore[attr-defined]
    taking_options.__annotations__ = {parameter.name: parameter.annotation for parameter in keywords}
    return taking_options


def flags_given(given: dict[str, Any], arguments: Sorted) -> Flags:
    """Returns what the command line says.

    Args:
        given: by name of option, as a command got them.
        arguments: the sources, which never come that way.
    """
    values = {}
    for option in (*SOURCE_OPTIONS, *OPTIONS):
        texts = given[option.name]
        if texts is not None and option.name != "weight":
            values[option.name] = list(texts) if option.about.repeat else [texts]
    return Flags(arguments.sources, {name: texts for name, texts in values.items() if texts}, arguments.problems)


def _of_option(option: Described) -> inspect.Parameter:
    kind = list[str] | None if option.about.repeat else str | None
    return _parameter(option.name, option.flag, kind, option.about.metavar, option.about.help, option.about.table)


def _parameter(name: str, flag: str, kind: Any, metavar: str, text: str, table: str) -> inspect.Parameter:
    # A bracket would be taken for markup.
    shown = typer.Option(flag, metavar=metavar, help=text.replace("[", r"\["), rich_help_panel=PANELS[table])
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind, shown])
