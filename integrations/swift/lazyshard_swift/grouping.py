"""``--group_by_length true``: what it works together with, and what is given up for it. Decisions only, as `settings`.

ms-swift's own sampler then goes through a stream that has ended: it shuffles all samples, cuts them into pieces of up
to 50 micro batches of all ranks, and sorts each piece by length (transformers' `get_length_grouped_indices`). That
order follows from the lengths, the seed, the epoch and the micro batch of all ranks, and from nothing that lazyshard
plans. So with it

- each rank reads rows of all chunks, and indices are samples: index i draws sample i of the stream;
- a run goes on where the same lengths, ranks and micro batches give the same order again, and is refused elsewhere;
- there is no state of the run by which it could be traced;
- no chunk is given up, since any may be drawn again.

What would have to be known before it is there, of a live stream or of samples that nobody has measured, is refused.
"""

from __future__ import annotations

from typing import Any, Final

from lazyshard_swift.errors import SettingsRefused

GROUPED: Final = "grouped"
"""The layout of a run in this order, beside "strided" and "block"."""

TOLD: Final = (
    "--group_by_length true: ms-swift's sampler goes through the whole stream in an order of its own. Every rank reads "
    "rows of all chunks, a checkpoint can be gone on from with the same ranks, micro batch and lengths alone, "
    "`lazyshard trace` and `audit` cannot tell what was trained, and the run keeps all chunks"
)
"""What is given up, for the log."""

_OURS: Final = ("shuffle_window", "shuffle_distance", "unit", "skip")
"""Arguments for an order of ours, without ``sharded_lazy_``."""


def is_asked(args: Any) -> bool:
    """Returns whether ms-swift's sampler is to group samples by length."""
    return bool(getattr(args, "group_by_length", False))


def check_alone(args: Any, megatron: bool) -> None:
    """Refuses what cannot work together with ``--group_by_length true``, if that is given.

    Args:
        args: the parsed arguments.
        megatron: whether they are those of a `megatron` command.

    Raises:
        SettingsRefused: with the way out.
    """
    if not is_asked(args):
        return
    if len(args.dataset) > 1:
        raise refused("it is for one stream, and --dataset has several: leave it out, or train one after the other")
    if getattr(args, "packing", False):
        raise refused("packs are all of about one length already: leave it out")
    if megatron and getattr(args, "padding_free", False):
        raise refused(
            "with --padding_free true, which is Megatron-SWIFT's default, nothing is padded, so nothing is won by it: "
            "leave it out, or give --padding_free false"
        )
    if not getattr(args, "train_dataloader_shuffle", True):
        raise refused("it shuffles, --train_dataloader_shuffle false does not: leave out one of them")
    for name in _OURS:
        value = getattr(args, f"sharded_lazy_{name}")
        if value is not None:
            raise refused(
                f"the order is that of ms-swift's sampler over the whole stream, and --sharded_lazy_{name} {value} is "
                f"for an order of lazyshard's: leave out one of them"
            )


def check_stream(directory: str, ended: bool, dealt: bool) -> None:
    """Refuses a stream that cannot be grouped.

    Args:
        directory: of the stream.
        ended: whether it has ended.
        dealt: whether its rows were dealt by cost.

    Raises:
        SettingsRefused: with the way out.
    """
    if not ended:
        raise refused(
            f"{directory}: the stream is still being produced, and how long samples are that are not there yet is not "
            f"known. Start once it has ended and `lazyshard measure` has measured it; or leave it out, and have the "
            f"producer deal rows by cost, with `lazyshard-producer run --balance`"
        )
    if dealt:
        raise refused(
            f"{directory}: its rows were dealt by cost, so that all ranks have as much to do in a step, and this would "
            f"put them into other steps: leave it out"
        )


def refused(why: str) -> SettingsRefused:
    """Returns the error, with the reason and the way out in `why`."""
    return SettingsRefused(f"--group_by_length true: {why}", argument="group_by_length")
