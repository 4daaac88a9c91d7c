"""What cannot be about what is made of rows: functions, columns, dealing by cost, packing, cutting, padding."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from lazyshard_producer.configuration.setting_checks import FUNCTION, MAX_SHUFFLE, SWIFT, flag, is_set
from lazyshard_producer.errors import Problem

if TYPE_CHECKING:
    from lazyshard_producer.configuration.settings import Settings

MAX_LENGTH: Final = 2**31 - 1
"""Tokens of a sample that ms-swift can be told."""

_OPTION_NAME: Final = re.compile(r"[a-z][a-z0-9_]*")
_OWN_OPTIONS: Final = {"model": "--model", "template": "--template", "max_length": "--max-length"}


def row_problems(settings: Settings, given: frozenset[str]) -> Iterator[Problem]:
    """Yields all that cannot be, in the order of the options; `given` as of `find_problems`."""
    yield from _of_functions(settings)
    yield from _of_columns(settings.columns)
    yield from _of_balance(settings, given)
    yield from _of_packing(settings, given)
    yield from _of_splitting(settings, given)
    yield from _of_padding(settings, given)
    yield from _of_tokens(settings)
    yield from _of_lengths(settings, given)
    yield from _of_measuring(settings)
    yield from _of_encoding(settings)


def _of_functions(settings: Settings) -> Iterator[Problem]:
    for option, function in (("--transform", settings.transform), ("--where", settings.where)):
        if function is not None and not FUNCTION.fullmatch(function):
            yield Problem(option, f"MODULE:FUNCTION is needed, such as my_rows:clean, got {function!r}")
    if settings.workers > 0 and settings.transform is settings.encode is settings.measure is None:
        text = f"they run --transform, --encode and --measure, and there is none, got {settings.workers}; leave it out"
        yield Problem("--workers", text)


def _of_columns(columns: tuple[tuple[str, str], ...]) -> Iterator[Problem]:
    for new, old in columns:
        if not new or not old or "=" in old:
            yield Problem("--columns", f"names of columns as NEW=OLD are needed, got {new!r} = {old!r}")
    names = [new for new, _ in columns]
    for name in sorted({name for name in names if names.count(name) > 1}):
        yield Problem("--columns", f"every new name once, got {name!r} {names.count(name)} times")


def _of_balance(settings: Settings, given: frozenset[str]) -> Iterator[Problem]:
    ranks, batch = settings.balance, settings.micro_batch_size
    if ranks is None:
        for name in ("micro_batch_size", "cost_per_token", "cost_per_token_squared"):
            if is_set(settings, name, given):
                yield Problem(flag(name), f"it is for --balance, and there is none, got {getattr(settings, name)!r}")
        return
    most = max(1, MAX_SHUFFLE // max(1, settings.samples_per_chunk))
    if not 1 <= ranks <= most:
        yield Problem("--balance", f"a number of ranks from 1 to {most} is needed, got {ranks}; none deals nothing")
    if settings.shuffle:
        text = "rows dealt by cost are in an order by chance already, as far as costs allow; leave out one of --shuffle"
        yield Problem("--balance", f"{text} {settings.shuffle} and --balance {ranks}")
    if batch < 1 or settings.samples_per_chunk % batch:
        text = f"a number of rows of which --samples-per-chunk {settings.samples_per_chunk} is a multiple is needed"
        yield Problem("--micro-batch-size", f"{text}, got {batch}")
    costs = settings.cost_per_token, settings.cost_per_token_squared
    for name, cost in zip(("cost_per_token", "cost_per_token_squared"), costs, strict=True):
        if not (math.isfinite(cost) and cost >= 0):
            yield Problem(flag(name), f"a number from 0 on is needed, got {cost:g}")
    if not any(costs):
        text = "a number above 0 is needed here or as --cost-per-token-squared, or rows cost nothing; got 0 for both"
        yield Problem("--cost-per-token", text)


def _of_packing(settings: Settings, given: frozenset[str]) -> Iterator[Problem]:
    if settings.pack:
        if settings.shuffle:
            text = "--pack goes by lengths, so the order of the rows in its buffer counts for nothing; leave it out"
            yield Problem("--shuffle", f"{text}, and shuffle packs in training")
        if settings.encode == SWIFT and ("mode", "rlhf") in settings.encode_option:
            text = "--pack is for samples of one sequence, and ms-swift trains no packs with mode=rlhf; leave one out"
            yield Problem("--encode-option", text)
        names = [new for new, _ in settings.columns]
        # A transform may add it.
        told = settings.transform or settings.encode or settings.measure
        if names and settings.length_field not in names and told is None:
            text = f"--pack needs the tokens of a row under {settings.length_field!r}; take that column in"
            yield Problem("--columns", f"{text}, or name another with --length-field")
        return
    for name in ("pack_buffer", "pack_buffer_bytes"):
        if is_set(settings, name, given):
            yield Problem(flag(name), "it is for --pack, and there is none; leave it out")


def _of_splitting(settings: Settings, given: frozenset[str]) -> Iterator[Problem]:
    every = [name for name in ("split_every_bos", "split_every_eos") if getattr(settings, name) is not None]
    if not settings.split:
        for name in ("split_bos", "split_eos", *every, "split_overlap"):
            if is_set(settings, name, given):
                yield Problem(flag(name), "it is for --split, and there is none; leave it out")
    elif every and 0 < settings.split <= len(every):
        text = f"a number from {1 + len(every)} is needed, so that a sequence has room for a row's token beside its own"
        yield Problem("--split", f"{text}, got {settings.split}")
    elif every and settings.split_overlap == 1:
        text = f"it goes not with {flag(every[0])}, whose token is none of what follows; leave out one of the two"
        yield Problem("--split-overlap", text)


def _of_padding(settings: Settings, given: frozenset[str]) -> Iterator[Problem]:
    if not settings.pad and is_set(settings, "pad_token", given):
        yield Problem("--pad-token", "it is for --pad, and there is none; leave it out")


def _of_tokens(settings: Settings) -> Iterator[Problem]:
    """Yields what is wrong about --split and --pad alike."""
    forms = [name for name in ("pack", "split", "pad") if getattr(settings, name)]
    if forms in ([], ["pack"]):
        return
    if len(forms) > 1:
        text = "a row is packed whole, cut or padded, and one of these alone; leave out all but one of"
        yield Problem(flag(forms[-1]), f"{text} {', '.join(map(flag, forms))}")
        return
    form = flag(forms[0])
    if settings.balance is not None:
        text = f"{form} gives rows of the same number of tokens, so there is nothing to be evened out"
        yield Problem("--balance", f"{text}; leave it out")
    if settings.encode == SWIFT and ("mode", "rlhf") in settings.encode_option:
        text = f"{form} is for samples of one sequence, and those of mode=rlhf have several; leave one out"
        yield Problem("--encode-option", text)
    names = [new for new, _ in settings.columns]
    if names and "input_ids" not in names and settings.transform is None and settings.encode is None:
        yield Problem("--columns", f"{form} needs the tokens of a row under 'input_ids'; take that column in")


def _of_lengths(settings: Settings, given: frozenset[str]) -> Iterator[Problem]:
    if not settings.length_field:
        yield Problem("--length-field", "the name of a key is needed, got an empty one")
    elif not is_set(settings, "length_field", given):
        return
    elif not settings.pack and settings.balance is None:
        yield Problem("--length-field", "it is for --pack and --balance, and there is neither; leave it out")
    elif settings.encode is not None:
        text = "the encoder tells the tokens of a row, as the 'length' of what it returns; leave it out"
        yield Problem("--length-field", text)
    elif settings.measure is not None:
        yield Problem("--length-field", "--measure tells the tokens of a row; leave out one of the two")


def _of_measuring(settings: Settings) -> Iterator[Problem]:
    measure = settings.measure
    if measure is None:
        if settings.measure_field is not None:
            yield Problem("--measure-field", "it is for --measure DIRECTORY, and there is none; leave it out")
        return
    if not measure:
        yield Problem("--measure", f"a folder, {SWIFT} or MODULE:FUNCTION is needed, got an empty text")
    for name in ("encode", "split", "pad"):
        if getattr(settings, name):
            yield Problem("--measure", f"{flag(name)} tells the length of what it makes; leave out one of the two")
    if settings.measure_field is not None and (measure == SWIFT or FUNCTION.fullmatch(measure)):
        yield Problem("--measure-field", f"it is for a tokenizer's folder, and --measure is {measure}; leave it out")


def _of_encoding(settings: Settings) -> Iterator[Problem]:
    swift = SWIFT in (settings.encode, settings.measure)
    if settings.encode is not None and settings.encode != SWIFT and not FUNCTION.fullmatch(settings.encode):
        yield Problem("--encode", f"{SWIFT} or MODULE:FUNCTION is needed, got {settings.encode!r}")
    if swift and not settings.model:
        option = "--encode" if settings.encode == SWIFT else "--measure"
        yield Problem("--model", f"{option} {SWIFT} needs the model's folder, got none; give --model DIRECTORY")
    given = (
        ("--model", settings.model),
        ("--template", settings.template),
        ("--max-length", settings.max_length),
        ("--encode-option", settings.encode_option or None),
    )
    if not swift:
        for option, value in given:
            if value is not None:
                yield Problem(option, f"it is for {SWIFT}, got {value!r}; leave it out, or give --encode {SWIFT}")
        return
    if settings.max_length is not None and not 1 <= settings.max_length <= MAX_LENGTH:
        yield Problem("--max-length", f"a number from 1 to {MAX_LENGTH} is needed, got {settings.max_length}")
    names = [name for name, _ in settings.encode_option]
    for name in sorted(set(names)):
        if not _OPTION_NAME.fullmatch(name):
            yield Problem("--encode-option", f"the name of an option of ms-swift is needed, got {name!r}")
        elif name in _OWN_OPTIONS:
            yield Problem("--encode-option", f"{name} has an option of its own; give {_OWN_OPTIONS[name]}")
        elif names.count(name) > 1:
            yield Problem("--encode-option", f"every name once, got {name} {names.count(name)} times")
