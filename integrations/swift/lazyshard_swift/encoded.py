"""Encoded streams in training: the template is not asked, but compared with what the rows were encoded with.

Rows that the producer has cut (`--split`) or padded (`--pad`) are said to be so by the fact `form`. ms-swift's collator
takes the `position_ids` of a sample where it puts samples one behind the other (``--padding_free``), and so keeps the
documents of a sequence apart. (ms-swift 4.6: `packing_row` and `_data_collator` in `swift/template/base.py`.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, TypeAlias

from lazyshard.format import Encoding
from lazyshard.format.encoding import differences
from lazyshard.plan.sequence_tokens import ATTENTION_MASK, INPUT_IDS, LABELS, NO_LABEL
from lazyshard.storage.manifest import read_manifest
from lazyshard.storage.urls import stream_path
from lazyshard_swift import packed
from lazyshard_swift.encoded_values import unpack
from lazyshard_swift.errors import SettingsRefused
from lazyshard_swift.fingerprint import OF_ROWS, fingerprint

Encode: TypeAlias = Callable[..., Any]

FORM: Final = "form"
SPLIT: Final = "split"
PAD: Final = "pad"

_LEFT_OUT: Final = {SPLIT: (FORM, "max_length", "truncation_strategy"), PAD: (FORM,)}
"""By form: what need not be alike. How long a row might be before it was cut is nothing for who trains the pieces."""


def encoders(
    directories: Sequence[str], template: Any, raw: Encode, packing_length: int | None = None
) -> tuple[Encode, ...]:
    """Returns what makes samples of the rows of each of these streams, which are there.

    Args:
        directories: of the streams.
        template: ms-swift's, in its training mode.
        raw: makes samples of rows that are not encoded.
        packing_length: most tokens of a pack, where rows are packs; None where they are not.

    Raises:
        SettingsRefused: a stream's rows were encoded otherwise than the template would encode them.
    """
    found: list[Encode] = []
    for directory in directories:
        manifest = read_manifest(stream_path(directory), None)
        if manifest is None or manifest.encoding is None:
            found.append(raw)
        else:
            check(directory, manifest.encoding, fingerprint(template))
            form = manifest.encoding.get(FORM)
            check_form(directory, form, template)
            found.append(EncodedRows(packing_length, form))
    return tuple(found)


class EncodedRows:
    """Turns encoded rows into what the template has returned; an `encode_fn` for `LazyShardedDataset`.

    Args:
        packing_length: most tokens of a pack, where rows are packs; None where they are not.
        form: "split" or "pad" where rows were cut or padded, else None.
    """

    def __init__(self, packing_length: int | None = None, form: Any = None) -> None:
        self._packing_length = packing_length
        self._form = form

    def __call__(self, row: dict[str, Any]) -> Any:
        """Returns the sample; of a pack the list of its samples.

        Raises:
            ValueError: it is a pack and was to be none, or the other way round; or it has more tokens than a pack may
                have.
        """
        sample = packed.encode(row, self._packing_length, unpack)
        if self._form == SPLIT:
            return _as_sequence(sample)
        return _as_padded(sample) if self._form == PAD else sample


def _as_sequence(sample: dict[str, Any]) -> dict[str, Any]:
    """Returns a sequence whose first token is nobody's label: ms-swift rolls labels, so the last one would predict it.

    It does the same where it cuts rows itself, with ``--truncation_strategy split``.
    """
    if sample.get(LABELS):
        sample[LABELS][0] = NO_LABEL
    return sample


def _as_padded(sample: dict[str, Any]) -> dict[str, Any]:
    """Returns a padded row as one of all its tokens, of which the last ones have no label: positions go by `length`."""
    sample.pop(ATTENTION_MASK, None)
    tokens = len(sample[INPUT_IDS])
    return sample | {"length": tokens, "lengths": [tokens]}


def check_form(directory: str, form: Any, template: Any) -> None:
    """Refuses what ms-swift would train otherwise than the rows of a stream say.

    Raises:
        SettingsRefused: each document of a sequence would be cut for context parallelism, whatever its length.
    """
    ranks = getattr(template, "sequence_parallel_size", 1)
    if form == SPLIT and ranks > 1 and getattr(template, "padding_free", False):
        raise SettingsRefused(
            f"--dataset {directory}: its rows are sequences of several documents (lazyshard-producer run --split), and "
            f"for context parallelism ({ranks} ranks) ms-swift cuts each of these into equal parts, which lengths of "
            f"any kind do not allow: give --padding_free false, with which all tokens of a sequence attend to each "
            f"other",
            argument="padding_free",
        )


def check(directory: str, stream: Encoding, own: Encoding) -> None:
    """Compares what a stream's rows were encoded with to what this run would encode them with.

    Raises:
        SettingsRefused: naming all that differs.
    """
    if stream.get("kind") != own.get("kind"):
        raise SettingsRefused(
            f"--dataset {directory}: its rows were encoded by {stream.get('function', stream.get('kind'))}, not by "
            f"ms-swift's template, so its trainer cannot take them: produce the stream anew with --encode swift, or "
            f"without --encode",
            argument="dataset",
        )
    found = differences(stream, own, leave_out=(*OF_ROWS, *_LEFT_OUT.get(str(stream.get(FORM)), ())))
    if found:
        raise SettingsRefused(
            f"--dataset {directory}: its rows were encoded otherwise than this run would encode them: "
            f"{'; '.join(found)} (there: the stream, here: this run). Train with the settings of the stream, or "
            f"produce it anew with those of this run",
            argument="dataset",
        )
