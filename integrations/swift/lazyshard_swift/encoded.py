"""Encoded streams in training: the template is not asked, but compared with what the rows were encoded with.

Rows that the producer has cut (`--split`) or padded (`--pad`) are said to be so by the fact `form`. With
``--padding_free`` ms-swift's collator puts samples one behind the other, and gives each positions of its own. So the
documents of a sequence are given to it as those of a pack are, in a list, which keeps them apart (see `packed`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, TypeAlias

from lazyshard.format import Encoding
from lazyshard.format.encoding import differences
from lazyshard.plan.sequence_tokens import ATTENTION_MASK, INPUT_IDS, LABELS, NO_LABEL, POSITION_IDS
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
LENGTH: Final = "length"
LENGTHS: Final = "lengths"

_LEFT_OUT: Final = {SPLIT: (FORM, "max_length", "truncation_strategy"), PAD: (FORM,)}
"""By form: what need not be alike. How long a row might be before it was cut is nothing for who trains the pieces."""


def encoders(
    directories: Sequence[str], template: Any, raw: Encode, packing_length: int | None = None
) -> tuple[Encode, ...]:
    """Returns what makes samples of the rows of each of these streams, which are there.

    Args:
        directories: of the streams.
        template: ms-swift's, in its training mode; is told where samples are lists of documents.
        raw: makes samples of rows that are not encoded.
        packing_length: most tokens of a pack, where rows are packs; None where they are not.

    Raises:
        SettingsRefused: a stream's rows were encoded otherwise than the template would encode them; or sequences are
            blended with other rows, which ms-swift's collator takes apart from each other alone.
    """
    found: list[Encode] = []
    forms: list[Any] = []
    for directory in directories:
        manifest = read_manifest(stream_path(directory), None)
        if manifest is None or manifest.encoding is None:
            found.append(raw)
            forms.append(None)
        else:
            check(directory, manifest.encoding, fingerprint(template))
            forms.append(manifest.encoding.get(FORM))
            apart = bool(getattr(template, "padding_free", False))
            found.append(EncodedRows(packing_length, forms[-1], apart=apart))
    if SPLIT in forms and getattr(template, "padding_free", False):
        if set(forms) != {SPLIT}:
            others = [directory for directory, form in zip(directories, forms, strict=True) if form != SPLIT]
            raise SettingsRefused(
                f"--dataset {' '.join(directories)}: with --padding_free true sequences (lazyshard-producer run "
                f"--split) are blended with sequences alone, and {', '.join(others)} holds others: give --padding_free "
                f"false",
                argument="padding_free",
            )
        template.packing = True
    return tuple(found)


class EncodedRows:
    """Turns encoded rows into what the template has returned; an `encode_fn` for `LazyShardedDataset`.

    Args:
        packing_length: most tokens of a pack, where rows are packs; None where they are not.
        form: "split" or "pad" where rows were cut or padded, else None.
        apart: whether a sequence that was cut becomes the list of the documents in it.
    """

    def __init__(self, packing_length: int | None = None, form: Any = None, *, apart: bool = False) -> None:
        self._packing_length = packing_length
        self._form = form
        self._apart = apart

    def __call__(self, row: dict[str, Any]) -> Any:
        """Returns the sample; of a pack the list of its samples, of a sequence that of its documents if asked for.

        Raises:
            ValueError: it is a pack and was to be none, or the other way round; or it has more tokens than a pack may
                have.
        """
        sample = packed.encode(row, self._packing_length, unpack)
        if self._form == SPLIT:
            return _documents(sample) if self._apart else _begun(sample)
        return _padded(sample) if self._form == PAD else sample


def _begun(sample: dict[str, Any]) -> dict[str, Any]:
    """Returns tokens of which the first is nobody's label: ms-swift rolls labels, so the last one would predict it.

    As of any sample of ms-swift's, those included that it cuts itself (``--truncation_strategy split``).
    """
    if sample.get(LABELS):
        sample[LABELS][0] = NO_LABEL
    return sample


def _documents(sample: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns the documents of a sequence, or parts of them, as samples; each has positions from 0."""
    names = [name for name in (INPUT_IDS, LABELS) if sample.get(name)]
    starts = [place for place, position in enumerate(sample[POSITION_IDS]) if position == 0]
    borders = zip(starts, [*starts[1:], len(sample[POSITION_IDS])], strict=True)
    return [
        _begun({**{name: sample[name][start:stop] for name in names}, LENGTH: stop - start, LENGTHS: [stop - start]})
        for start, stop in borders
    ]


def _padded(sample: dict[str, Any]) -> dict[str, Any]:
    """Returns a padded row as one of all its tokens, of which the last ones have no label: positions go by `length`."""
    sample.pop(ATTENTION_MASK, None)
    tokens = len(sample[INPUT_IDS])
    return sample | {LENGTH: tokens, LENGTHS: [tokens]}


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
