"""`lazyshard-producer init`: an example of a configuration file, made from the table of options."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Iterator
from typing import Final

from lazyshard.store.durable import NEW_FILE_MODE
from lazyshard_producer.configuration.config import TABLES
from lazyshard_producer.configuration.option import PANELS, Option
from lazyshard_producer.configuration.options import OPTIONS
from lazyshard_producer.configuration.source_options import SOURCE_OPTIONS
from lazyshard_producer.errors import SettingInvalid

DEFAULT_FILE: Final = "lazyshard-producer.toml"

_WIDTH: Final = 100

_GIVEN: Final = ("out", "samples_per_chunk")
"""What every run needs; the rest of the example is commented out."""

_START: Final = """\
# What `lazyshard-producer run --config FILE` is to do. `lazyshard-producer check FILE` shows what that means.
#
# Each key is a flag with underscores, and the flag counts where both are given. Lines that begin with "#" are
# examples: take the "#" away to use one. Paths are relative to the directory in which the command is started.
#
# A file like this one is to be trusted like a program: transform, where, encode and "python:" sources name code
# that is run.
"""

_SOURCES: Final = """\

# Where rows come from: a [[source]] for each. Without weights they are read one after another, in this order.
[[source]]
# JSON lines (.gz and .zst too), a pattern such as "data/*.jsonl", or a list of these; Parquet or Arrow files; a
# directory of a Hugging Face data set; "-" for standard input, or a named pipe; "python:MODULE:FUNCTION".
path = "data.jsonl"

# Or a directory into which other programs write, for as long as they do:
# [[source]]
# follow = "incoming"
"""


def example() -> str:
    """Returns the text of the example."""
    top = (option for option in OPTIONS if not option.table)
    parts = [_START, *map(_entry, top), _SOURCES, *map(_entry, SOURCE_OPTIONS)]
    for table in TABLES:
        parts.append(f"\n# {PANELS[table]}\n[{table}]\n")
        parts += [_entry(option) for option in OPTIONS if option.table == table]
    return "".join(parts)


def write_example(path: str) -> None:
    """Writes the example to a file that is not there yet.

    Raises:
        SettingInvalid: there is something of this name.
        OSError: the filesystem refused.
    """
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, NEW_FILE_MODE)
    except FileExistsError:
        raise SettingInvalid(
            f"{path}: there is a file of this name already, and it is left as it is; give another name", option="FILE"
        ) from None
    with open(fd, "w", encoding="utf-8") as file:
        file.write(example())


def _entry(option: Option) -> str:
    lines = "".join(f"# {line}\n" for line in _wrapped(option.help))
    mark = "" if option.name in _GIVEN else "# "
    return f"\n{lines}{mark}{option.name} = {option.example}\n"


def _wrapped(text: str) -> Iterator[str]:
    yield from textwrap.wrap(text, _WIDTH, break_on_hyphens=False)
