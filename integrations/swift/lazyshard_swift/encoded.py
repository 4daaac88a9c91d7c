"""Encoded streams in training: the template is not asked, but compared with what the rows were encoded with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from lazyshard.format import Encoding
from lazyshard.format.encoding import differences
from lazyshard.storage.manifest import read_manifest
from lazyshard.storage.urls import stream_path
from lazyshard_swift import packed
from lazyshard_swift.encoded_values import unpack
from lazyshard_swift.errors import SettingsRefused
from lazyshard_swift.fingerprint import OF_ROWS, fingerprint

Encode: TypeAlias = Callable[..., Any]


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
            found.append(EncodedRows(packing_length))
    return tuple(found)


class EncodedRows:
    """Turns encoded rows into what the template has returned; an `encode_fn` for `LazyShardedDataset`.

    Args:
        packing_length: most tokens of a pack, where rows are packs; None where they are not.
    """

    def __init__(self, packing_length: int | None = None) -> None:
        self._packing_length = packing_length

    def __call__(self, row: dict[str, Any]) -> Any:
        """Returns the sample; of a pack the list of its samples.

        Raises:
            ValueError: it is a pack and was to be none, or the other way round; or it has more tokens than a pack may
                have.
        """
        return packed.encode(row, self._packing_length, unpack)


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
    found = differences(stream, own, leave_out=OF_ROWS)
    if found:
        raise SettingsRefused(
            f"--dataset {directory}: its rows were encoded otherwise than this run would encode them: "
            f"{'; '.join(found)} (there: the stream, here: this run). Train with the settings of the stream, or "
            f"produce it anew with those of this run",
            argument="dataset",
        )
