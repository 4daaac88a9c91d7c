"""How objects of a stream come into the store: a chunk, once and for all; a file that is replaced.

Of a chunk the side file of its arrays is put first if it has one, then the data object, the seal last, all under the
condition that there is none. So no two producers can both publish chunk N, whichever of them believes that the stream
is its own: the seal is put once.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Final

import numpy as np
import xxhash

from lazyshard.errors import FormatInvalid, StreamInvalid
from lazyshard.format import Seal, SealedArrays
from lazyshard.format.names import arrays_name, chunk_name, seal_name
from lazyshard.store.objects import ObjectStore
from lazyshard_producer.shipping.tries import Tries

_TURNS: Final = 10
"""An object is another one than at the look before only if somebody has put it in between; not so often in a row."""


def put_chunk(
    store: ObjectStore,
    tries: Tries,
    check_owner: Callable[[], None],
    chunk: int,
    data: bytes,
    seal: bytes,
    arrays: bytes | None = None,
) -> None:
    """Puts a chunk. It is published if and only if this returns.

    May be repeated, after a crash for instance: what is there already stays.

    Raises:
        ProducerFenced: as `check_owner` raises it.
        StreamInvalid: another producer has published this chunk, with other rows.
        StoreRefused, StoreUnavailable: see `Tries`.
    """
    replaced = {
        name: _put_data(store, tries, check_owner, chunk, name, content)
        for name, content in ((arrays_name(chunk), arrays), (chunk_name(chunk), data))
        if content is not None
    }
    check_owner()
    name = seal_name(chunk)
    if tries(lambda: store.put_new(name, seal)):
        return
    found = tries(lambda: store.get(name))
    if is_same_chunk(found, seal, chunk):
        return
    # By one that has taken the stream over since the look before; or by one that had it before, in its last moment.
    check_owner()
    for replaced_name, content in replaced.items():
        if content is not None and _is_sealed_by(found, content, chunk, arrays=replaced_name == arrays_name(chunk)):
            replace(store, tries, check_owner, replaced_name, content)
    raise other_chunk(store, chunk)


def other_chunk(store: ObjectStore, chunk: int) -> StreamInvalid:
    """Returns the error for a chunk that another producer has published."""
    return StreamInvalid(
        f"{store.name_of(seal_name(chunk))}: another producer has published this chunk, with other rows, in its last "
        f"moment; this one stops, and nothing of the stream was changed. Run the same command again: it goes on after "
        f"that chunk",
        directory=store.url,
        chunk=chunk,
    )


def is_same_chunk(one: bytes, other: bytes, chunk: int) -> bool:
    """Whether two seals are of the same rows and the same position, whenever they were made."""
    if one == other:
        return True
    try:
        a, b = Seal.decode(one, chunk), Seal.decode(other, chunk)
    except FormatInvalid:
        return False
    if a.arrays is not None and b.arrays is not None:
        return _are_alike(a.arrays, b.arrays) and _are_alike(a, b) and a.source == b.source
    return a.arrays is b.arrays and _are_alike(a, b) and a.source == b.source


def _are_alike(one: Seal | SealedArrays, other: Seal | SealedArrays) -> bool:
    return np.array_equal(one.offsets, other.offsets) and np.array_equal(one.digests, other.digests)


def replace(store: ObjectStore, tries: Tries, check_owner: Callable[[], None], name: str, data: bytes) -> bytes | None:
    """Puts an object in place of the one of its name, unless it is the same; returns that one.

    One that is fenced meanwhile cannot overwrite what its successor has put: the tag is older than its look at the
    owner.

    Raises:
        ProducerFenced: as `check_owner` raises it.
        StreamInvalid: somebody replaces this object all the time.
        StoreRefused, StoreUnavailable: see `Tries`.
    """
    for _ in range(_TURNS):
        try:
            found, tag = tries(lambda: store.get_tagged(name))
        except FileNotFoundError:
            check_owner()
            if tries(lambda: store.put_new(name, data)):
                return None
            continue
        if found == data:
            return None
        check_owner()
        if tries(lambda tag=tag: store.put_matching(name, data, tag)):  # type: ignore[misc]
            return found
    raise StreamInvalid(
        f"{store.name_of(name)}: somebody else puts this object all the time; find out who, and stop it",
        directory=store.url,
    )


def _put_data(
    store: ObjectStore, tries: Tries, check_owner: Callable[[], None], chunk: int, name: str, data: bytes
) -> bytes | None:
    """Puts an object of a chunk; returns that of another producer which was there and is not any more."""
    if tries(lambda: store.put_new(name, data)):
        return None
    # Left by a producer that was killed before the seal, mostly with the same rows. Nobody has read it without a seal.
    try:
        tries(lambda: store.size(seal_name(chunk)))
    except FileNotFoundError:
        return replace(store, tries, check_owner, name, data)
    return None


def _is_sealed_by(seal: bytes, rows: bytes, chunk: int, *, arrays: bool) -> bool:
    try:
        decoded = Seal.decode(seal, chunk)
    except FormatInvalid:
        return False
    found = decoded.arrays if arrays else decoded
    if found is None:
        return False
    starts = found.offsets.tolist()
    return found.size == len(rows) and found.digests.tolist() == [
        xxhash.xxh3_64_intdigest(rows[start:stop]) for start, stop in itertools.pairwise(starts)
    ]
