"""The table of options as typer takes them, so that each option is written down once for all commands and the file."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Annotated, Any, Final

import typer

from lazyshard_producer.configuration.arguments import Sorted
from lazyshard_producer.configuration.assembly import Flags
from lazyshard_producer.configuration.option import PANELS, Option
from lazyshard_producer.configuration.options import OPTIONS
from lazyshard_producer.configuration.source_options import SOURCE_OPTIONS

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
            values[option.name] = list(texts) if option.repeat else [texts]
    return Flags(arguments.sources, {name: texts for name, texts in values.items() if texts}, arguments.problems)


def _of_option(option: Option) -> inspect.Parameter:
    kind = list[str] | None if option.repeat else str | None
    return _parameter(option.name, option.flag, kind, option.metavar, option.help, option.table)


def _parameter(name: str, flag: str, kind: Any, metavar: str, text: str, table: str) -> inspect.Parameter:
    # A bracket would be taken for markup.
    shown = typer.Option(flag, metavar=metavar, help=text.replace("[", r"\["), rich_help_panel=PANELS[table])
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind, shown])
