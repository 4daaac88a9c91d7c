"""Reads a configuration, and finds all that is wrong with it at once."""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from lazyshard.config.config import (
    VERSION,
    Config,
    DatasetConfig,
    LoaderConfig,
    StepConfig,
    TokenizerConfig,
)
from lazyshard.config.entries import Entry, entries_of, read_yaml
from lazyshard.config.mistakes import Mistake
from lazyshard.config.section import REQUIRED, Section
from lazyshard.config.version_0 import NOTICE, is_version_0, upgraded
from lazyshard.errors import ConfigInvalid

__all__ = ["Checked", "Source", "check_config", "examine", "read_config"]

Source = str | os.PathLike[str] | Mapping[str, Any]
"""A configuration: the path of a YAML file, or a dict."""

_STEPS: Final = ("message_transform", "filter_fn", "map")
_UNITS: Final = ("chunk", "sample", "batch", "auto")
_MOST_BYTES: Final = 1 << 20


class Checked(NamedTuple):
    """A configuration that was looked at.

    Attributes:
        name: of the file, for messages; "the configuration" of a dict.
        config: what it says; None where there are mistakes.
        mistakes: in the order of the file.
        notice: that it is of an older version, and what is new; None where it is not.
    """

    name: str
    config: Config | None
    mistakes: tuple[Mistake, ...]
    notice: str | None


def check_config(config: Source, *, imports: bool = True) -> list[Mistake]:
    """Returns all mistakes of a configuration, each with its path and, of a file, its line; none if it is in order.

    Args:
        config: the path of a YAML file, or a dict.
        imports: whether to look for the functions that it names, which imports their modules.

    Raises:
        OSError: the file cannot be read.
        ImportError: PyYAML is not installed.
    """
    return list(examine(config, imports=imports).mistakes)


def read_config(config: Source) -> Checked:
    """Returns a configuration without mistakes.

    Raises:
        ConfigInvalid: there are some; the message has a line for each.
        OSError, ImportError: as `check_config`.
    """
    checked = examine(config, imports=True)
    if checked.mistakes:
        count = len(checked.mistakes)
        lines = [f"{checked.name}: {count} mistake{'' if count == 1 else 's'}", *map(str, checked.mistakes)]
        file = None if isinstance(config, Mapping) else checked.name
        raise ConfigInvalid("\n  ".join(lines), file=file, count=count)
    return checked


def examine(config: Source, *, imports: bool) -> Checked:
    """Looks at a configuration. Arguments and errors as of `check_config`."""
    if isinstance(config, Mapping):
        name, (whole, mistakes) = "the configuration", entries_of(config)
    else:
        name = os.fspath(config)
        text, wrong = _text(Path(name))
        if wrong:
            return Checked(name, None, (Mistake("", None, wrong),), None)
        whole, mistakes = read_yaml(text)
    if mistakes and not whole.value:
        return Checked(name, None, tuple(mistakes), None)
    older = isinstance(whole.value, dict) and is_version_0(whole.value)
    if older:
        whole = upgraded(whole, mistakes)
    found = _config(Section(whole, mistakes, imports=imports))
    # In the order of the file, as an editor goes through it; of a dict, in that in which they were found.
    order = sorted(range(len(mistakes)), key=lambda number: (mistakes[number].line or 0, number))
    in_order = tuple(mistakes[number] for number in order)
    return Checked(name, None if mistakes else found, in_order, NOTICE if older else None)


def _text(path: Path) -> tuple[str, str]:
    """Returns the text of a file, or why there is none."""
    # Without O_NONBLOCK a pipe that nobody writes to is waited for.
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        mode = os.fstat(fd).st_mode
        if stat.S_ISDIR(mode):
            return "", "expected a YAML file, found a directory; a stream is opened by LazyShardedDataset, not by load"
        if not stat.S_ISREG(mode):
            return "", "expected a YAML file, found a pipe or a device; write what it gives to a file"
        with open(fd, "rb", closefd=False) as file:
            data = file.read(_MOST_BYTES + 1)
    finally:
        os.close(fd)
    if len(data) > _MOST_BYTES:
        return "", f"larger than {_MOST_BYTES} bytes, which no configuration is"
    try:
        return data.decode("utf-8-sig"), ""
    except UnicodeDecodeError as error:
        return "", f"no UTF-8: {error}"


def _config(top: Section) -> Config | None:
    if not top.usable:
        return None
    version = top.get("version", f"{VERSION}", lambda value: type(value) is int and value >= VERSION, REQUIRED)
    if version is not None and version > VERSION:
        text = f"this lazyshard reads versions 0 and {VERSION}, found {version}, which a later one reads: install that"
        top.note(top.entry.value["version"], text)
        # Its keys are others.
        return None
    sections = top.sections("datasets", "a mapping with the path: of a stream", REQUIRED)
    config = Config(
        tokenizer=_tokenizer(top.section("tokenizer")),
        datasets=tuple(map(_dataset, sections)),
        dataloader=_loader(top),
        num_samples=top.integer("num_samples", None, 1),
        stopping=top.choice("stopping", ("first_exhausted", "all_exhausted"), "first_exhausted"),
        micro_batches_per_step=top.integer("micro_batches_per_step", None, 1),
        seed=top.integer("seed", 0, 0),
        max_wait=top.number("max_wait", 600.0),
        consumer=top.text("consumer", None),
    )
    top.finish()
    _check_together(top, config, sections)
    return config


def _tokenizer(section: Section | None) -> TokenizerConfig | None:
    if section is None:
        return None
    path = section.text("path", REQUIRED, "the directory of a tokenizer")
    if path is not None and not os.path.isdir(path):
        section.note(section.entry.value["path"], f"there is no directory {path!r}, seen from {os.getcwd()}")
    found = TokenizerConfig(
        path, section.integer("max_length", None, 1), section.choice("too_long", ("drop", "truncate"), "drop")
    )
    section.finish()
    return found


def _dataset(section: Section) -> DatasetConfig:
    steps = section.sections("steps", "a mapping such as filter_fn: my_rows:keep", ())
    found = DatasetConfig(
        path=section.text("path", REQUIRED, "the directory of a stream"),
        weight=section.number("weight", 1.0),
        steps=tuple(filter(None, map(_step, steps))),
        max_error_count=section.integer("max_error_count", None, 0) if section.has("max_error_count") else 100,
        unit=section.get(
            "unit",
            f"one of {', '.join(_UNITS)}, or an integer from 1",
            lambda value: value in _UNITS or (type(value) is int and value >= 1),
            "chunk",
        ),
        shuffle_window=section.integer("shuffle_window", 0, 0),
        max_total_samples=section.integer("max_total_samples", None, 1),
        samples_per_chunk=section.integer("samples_per_chunk", None, 1),
        cache_bytes=section.integer("cache_bytes", 0, 0),
    )
    section.knows("max_error_count")
    section.finish()
    return found


def _step(section: Section) -> StepConfig | None:
    if not section.usable:
        return None
    names = [name for name in _STEPS if section.has(name)]
    for name in _STEPS:
        section.knows(name)
    if len(names) != 1 or len(section.entry.value) != 1:
        section.finish()
        if len(names) != 1 and (names or not section.entry.value):
            found = " and ".join(names) or "nothing"
            section.note(section.entry, f"expected one of {', '.join(_STEPS)}, found {found}")
        return None
    (kind,) = names
    if not isinstance(section.entry.value[kind].value, dict):
        return StepConfig(kind, section.function(kind, REQUIRED), False, ())
    inner = section.section(kind)
    assert inner is not None
    step = StepConfig(
        kind,
        inner.function("function", REQUIRED),
        kind != "message_transform" and inner.flag("with_indices", False),
        inner.texts("remove_columns") if kind == "map" else (),
    )
    inner.finish()
    return step


def _loader(top: Section) -> LoaderConfig:
    section = top.section("dataloader") or Section(Entry({}, "dataloader", None), [], imports=False)
    found = LoaderConfig(
        form=section.choice("form", ("stream", "map"), "stream"),
        at_end=section.choice("at_end", ("drop", "pad", "loop"), "drop"),
        batch_size=section.integer("batch_size", 1, 1),
        num_workers=section.integer("num_workers", 0, 0),
        collate_fn=section.function("collate_fn", None),
        pin_memory=section.flag("pin_memory", False),
        prefetch_factor=section.integer("prefetch_factor", None, 1),
        persistent_workers=section.flag("persistent_workers", False),
        multiprocessing_context=section.choice("multiprocessing_context", ("fork", "spawn", "forkserver"), None),
    )
    if found.num_workers == 0:
        for name in ("prefetch_factor", "persistent_workers", "multiprocessing_context"):
            if getattr(found, name):
                section.note(section.entry.value[name], "of worker processes, and num_workers is 0")
    section.finish()
    return found


def _check_together(top: Section, config: Config, sections: list[Section]) -> None:
    """Takes note of values that are in order by themselves and not together."""
    entries = top.entry.value
    if top.has("datasets") and entries["datasets"].value == []:
        top.note(entries["datasets"], "expected at least one data set, found an empty list")
    first: dict[str, str] = {}
    for section, dataset in zip(sections, config.datasets, strict=True):
        if isinstance(dataset.path, str):
            path = os.path.abspath(dataset.path)
            if path in first:
                where = section.entry.value.get("path") or section.entry
                top.note(where, f"the stream of {first[path]} once more; give it once, with the sum of the weights")
            first.setdefault(path, section.entry.path)
    loader = config.dataloader
    if loader.at_end in ("pad", "loop"):
        at_end = entries["dataloader"].value["at_end"]
        for holds, why in (
            (loader.form == "map", "with `form: map` the samples left over are dropped"),
            (len(sections) > 1, "several data sets end by `stopping` or `num_samples`"),
            (config.num_samples is not None, "with `num_samples` nothing is left over"),
        ):
            if holds:
                top.note(at_end, f"expected drop, found {loader.at_end}: {why}")
