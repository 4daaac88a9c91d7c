"""Which values our own arguments may have. Decisions only: no files, no ms-swift, no torch."""

from __future__ import annotations

import re
from typing import Any, Final, get_args

from lazyshard.format.byte_size import parse_size
from lazyshard.format.cursor import check_consumer
from lazyshard.format.kept_sample import LEAST_CACHE_BYTES
from lazyshard.plan import UNIT_NAMES
from lazyshard_swift.distance import check_alone
from lazyshard_swift.errors import refused
from lazyshard_swift.grouping import check_alone as check_grouping
from lazyshard_swift.settings import OnBadSample, OnEnd, is_megatron
from lazyshard_swift.skipping import parse_skips

_COLLECTIVE_SLACK_S: Final = 60.0
"""A rank that gives up waiting needs a moment to say so before its peers' collectives time out."""


def check_own(args: Any) -> None:
    """Refuses what cannot be, by itself or with the arguments that bear on it.

    Raises:
        SettingsRefused: with the reason and the way out.
    """
    wait, timeout = args.sharded_lazy_max_wait, getattr(args, "ddp_timeout", None)
    if not wait > 0:
        raise refused("sharded_lazy_max_wait", f"--sharded_lazy_max_wait is a number of seconds above 0, got {wait}")
    if timeout is not None and wait + _COLLECTIVE_SLACK_S > timeout:
        raise refused(
            "sharded_lazy_max_wait",
            f"--sharded_lazy_max_wait {wait:g} must end at least {_COLLECTIVE_SLACK_S:g} s before --ddp_timeout "
            f"{timeout}, or a collective times out first and hides the reason: raise --ddp_timeout or wait less",
        )
    window = args.sharded_lazy_shuffle_window
    if window is not None and window < 0:
        raise refused(
            "sharded_lazy_shuffle_window",
            f"--sharded_lazy_shuffle_window is a number of chunks, 0 for none, got {window}",
        )
    if window and not getattr(args, "train_dataloader_shuffle", True):
        raise refused(
            "sharded_lazy_shuffle_window",
            f"--sharded_lazy_shuffle_window {window} shuffles, --train_dataloader_shuffle false does not: leave out "
            f"one of them",
        )
    distance = args.sharded_lazy_shuffle_distance
    if distance is not None:
        check_alone(distance, window, getattr(args, "train_dataloader_shuffle", True), len(args.dataset))
    parse_unit(args.sharded_lazy_unit)
    check_grouping(args, is_megatron(args))
    size = args.sharded_lazy_samples_per_chunk
    if size is not None and size < 1:
        raise refused(
            "sharded_lazy_samples_per_chunk", f"--sharded_lazy_samples_per_chunk is a number from 1, got {size}"
        )
    if args.sharded_lazy_consumer is not None:
        try:
            check_consumer(args.sharded_lazy_consumer)
        except ValueError as cause:
            raise refused(
                "sharded_lazy_consumer", f"--sharded_lazy_consumer: {cause}; give another, or none"
            ) from cause
    _check_encode_cache(args.sharded_lazy_encode_cache, args.sharded_lazy_encode_cache_size)
    if args.sharded_lazy_skip is not None:
        try:
            parse_skips(args.sharded_lazy_skip)
        except ValueError as cause:
            raise refused("sharded_lazy_skip", f"--sharded_lazy_skip: {cause}") from cause
    for name, choices in (("sharded_lazy_on_end", OnEnd), ("sharded_lazy_on_bad_sample", OnBadSample)):
        value = getattr(args, name)
        if value is not None and value not in get_args(choices):
            raise refused(name, f"--{name} is one of {', '.join(get_args(choices))}, got {value!r}")


def _check_encode_cache(directory: str | None, size: str | None) -> None:
    if directory is not None and (not directory or "\0" in directory):
        raise refused("sharded_lazy_encode_cache", "--sharded_lazy_encode_cache is a directory of this node")
    if size is None:
        return
    if directory is None:
        raise refused(
            "sharded_lazy_encode_cache_size",
            f"--sharded_lazy_encode_cache_size {size} bounds the cache that --sharded_lazy_encode_cache DIR makes: "
            f"give both, or none",
        )
    try:
        number = parse_size(size)
    except ValueError as cause:
        raise refused("sharded_lazy_encode_cache_size", f"--sharded_lazy_encode_cache_size: {cause}") from cause
    if number < LEAST_CACHE_BYTES:
        raise refused(
            "sharded_lazy_encode_cache_size",
            f"--sharded_lazy_encode_cache_size is at least {LEAST_CACHE_BYTES} bytes, got {size}: less keeps no sample",
        )


def parse_unit(given: str | int | None) -> str | int | None:
    """Returns what is dealt to the ranks in turn, by name or as a number of samples; None where nothing is said.

    Args:
        given: as on the command line; a number where a configuration file has one.

    Raises:
        SettingsRefused: it is neither.
    """
    if given is None or given in UNIT_NAMES:
        return given
    # Not more digits than a count can have; int() takes signs and other digits too.
    if re.fullmatch(r"[1-9][0-9]{0,17}", str(given)):
        return int(given)
    raise refused(
        "sharded_lazy_unit",
        f"--sharded_lazy_unit is one of {', '.join(UNIT_NAMES)} or a number of samples from 1, got {given!r}",
    )
