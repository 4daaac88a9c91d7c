"""``--packing true`` on a stream whose rows are packs already, as `lazyshard-producer run --pack` publishes them.

Where ms-swift packs by itself, a sample of its `PackingDataset` is the list of the encoded rows of a pack, and its
template's collator takes such lists apart, puts all rows of the micro batch one behind the other, and gives each
positions from 0, from which the borders between them (`cu_seqlens`) follow. The same lists are made here of rows that
are packs. (ms-swift 4.6: `swift/dataset/packing.py`; `data_collator` and `packing_row` in `swift/template/base.py`.)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lazyshard import LazyShardError, StreamReader
from lazyshard.errors import ChunkRetired, SkipSample
from lazyshard.format import decode_pack, parse_row
from lazyshard.memory import raise_if_short
from lazyshard_swift.errors import SettingsRefused

_PRODUCE = "make them where the stream is produced, with `lazyshard-producer run --pack TOKENS`"


def prepare(args: Any, template: Any) -> None:
    """Has ms-swift's template take lists of encoded rows, as `PackingDataset` does, if ``--packing`` is given."""
    if getattr(args, "packing", False):
        template.packing = True
        template.padding_free = True


def packing_length(args: Any) -> int | None:
    """Returns the most tokens of a pack, None where samples are not packed."""
    if not getattr(args, "packing", False):
        return None
    length: int | None = getattr(args, "packing_length", None) or args.max_length
    if length is None:
        raise _refused("--packing true needs to know the most tokens of a pack: give --packing_length N")
    return length


def check_stream(args: Any, reader: StreamReader, samples: int) -> None:
    """Refuses a stream of packs without ``--packing``, and one of other rows with it, as far as there are rows yet.

    Args:
        args: ms-swift's arguments.
        reader: of the stream.
        samples: published, as all ranks know.

    Raises:
        SettingsRefused: with the way out.
    """
    if not samples:
        return
    try:
        row = _row(reader, samples)
    except LazyShardError:
        # Whoever reads on there will say so.
        return
    wrong = _mismatch(decode_pack(row) is not None, bool(getattr(args, "packing", False)))
    if wrong is not None:
        raise _refused(f"--dataset {reader.directory}: {wrong}")


def encode(row: dict[str, Any], most: int | None, encode_row: Callable[[dict[str, Any]], Any]) -> Any:
    """Returns what the collator takes for a row: it encoded, or for a pack the list of its rows encoded.

    Args:
        row: of the stream.
        most: tokens of a pack, None where there are to be no packs.
        encode_row: ms-swift's template, for one row.

    Raises:
        SkipSample: a row of the pack is too long, or ms-swift drops it: the pack is left out.
        ValueError: it is a pack and was to be none, or the other way round; a row of it cannot be encoded; or it has
            more tokens than a pack may have.
    """
    pack = decode_pack(row)
    wrong = _mismatch(pack is not None, most is not None)
    if wrong is not None:
        raise ValueError(wrong)
    if pack is None or most is None:
        return encode_row(row)
    samples = []
    for number, inner in enumerate(pack.rows):
        try:
            samples.append(encode_row(inner))
        except SkipSample as cause:
            raise SkipSample(f"row {number} of its pack: {cause}") from cause
        except Exception as cause:
            raise_if_short(cause)
            raise ValueError(f"row {number} of its pack: {type(cause).__name__}: {cause}") from cause
    lengths = [sum(sample["lengths"]) for sample in samples]
    if sum(lengths) > most:
        raise ValueError(
            f"its pack has {sum(lengths)} tokens, more than the {most} of --packing_length: its rows have {lengths} as "
            f"encoded here, and {pack.lengths} as they were packed. Measure them with the template that is trained"
        )
    return samples


def _row(reader: StreamReader, samples: int) -> dict[str, Any]:
    """Returns a row that is there."""
    try:
        return parse_row(reader.line(0))
    except ChunkRetired:
        return parse_row(reader.line(samples - 1))


def _mismatch(is_pack: bool, packing: bool) -> str | None:
    """Returns what is wrong where packs and ``--packing`` do not go together."""
    if is_pack and not packing:
        return "its rows are packs (lazyshard-producer run --pack): give --packing true"
    if packing and not is_pack:
        return (
            "its rows are no packs, and a stream cannot be sorted into packs before training as a whole data set is: "
            f"{_PRODUCE}, or leave out --packing; with --padding_free true the samples of a micro batch are "
            "concatenated without padding"
        )
    return None


def _refused(message: str) -> SettingsRefused:
    return SettingsRefused(message, argument="packing")
