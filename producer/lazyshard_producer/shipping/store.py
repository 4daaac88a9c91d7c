"""A stream in an object store: what is in it, who may put to it, and calls that are repeated until the store does them.

The object `stream.owner` is taken under a condition. A start always takes the stream over, as it does in a directory:
there is no lease to wait for, and nothing to renew. The one that was there before finds itself fenced at its next look,
and could not publish a chunk twice if it did not look: a seal is put only where there is none.

`ObjectStore` could repeat by itself. Here others want to know meanwhile since when and why, and to break it off.
"""

from __future__ import annotations

import os
import secrets
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from dataclasses import replace as changed
from typing import Final, NamedTuple, TypeVar

from lazyshard.errors import ChunkMissing, FileInvalid, ProducerFenced, StoreUnavailable, StreamInvalid, StreamMismatch
from lazyshard.format.names import END, MANIFEST, OWNER, RETIRED, arrays_name, chunk_name, seal_name
from lazyshard.format.records import End, Manifest, Owner, Retired
from lazyshard.store.objects import FIRST_PAUSE_S, ObjectStore, next_pause, why_failed
from lazyshard.stream.listing import Listing, sort_names

_T = TypeVar("_T")

SHOWN_S: Final = 2.0
"""A failure that passes sooner is nobody's concern."""


class GivenUp(Exception):
    """A call was broken off by whoever wanted it."""


class Tries:
    """Calls a store that repeats nothing by itself (patience 0).

    Args:
        url: of the stream, for messages.
        patience_s: for how long what fails is repeated.
        left_in: where what was not put yet is kept, in words.
        pause: waits for so many seconds; returns True where it is to be given up.
    """

    def __init__(
        self,
        url: str,
        patience_s: float,
        left_in: str,
        *,
        pause: Callable[[float], bool],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._url = url
        self._patience_s = patience_s
        self._left_in = left_in
        self._pause = pause
        self._clock = clock
        self._since: float | None = None
        self._words = ""

    @property
    def trouble(self) -> str | None:
        """Why nothing comes through, for how long, in words; None where it does, and in the first moments."""
        since = self._since
        if since is None or (lasted := self._clock() - since) < SHOWN_S:
            return None
        return f"the store has not answered for {lasted:.0f} s ({self._words})"

    def __call__(self, call: Callable[[], _T]) -> _T:
        """Returns what the call returns.

        Raises:
            StoreUnavailable: it has failed for as long as patience lasts.
            GivenUp: the pause was broken off.
            StoreRefused, OSError: as the call raises it; not repeated.
        """
        started = self._clock()
        length = FIRST_PAUSE_S
        while True:
            try:
                result = call()
            except StoreUnavailable as error:
                cause = error
            else:
                self._since = None
                return result
            if self._since is None:
                self._since = started
            self._words = why_failed(cause.__cause__ or cause).words
            waited = self._clock() - started
            if waited + length > self._patience_s:
                raise StoreUnavailable(
                    f"{self._url}: the store has failed for {waited:.0f} s (--store-patience-seconds "
                    f"{self._patience_s:g}): {self._words}. Is it reachable from this machine, and its endpoint right "
                    f"(AWS_ENDPOINT_URL for S3)? {self._left_in}",
                    url=self._url,
                    waited=waited,
                ) from cause
            if self._pause(length):
                raise GivenUp
            length = next_pause(length)


_TURNS: Final = 10
"""An object is another one than at the look before only if somebody has put it in between; not so often in a row."""


@dataclass(frozen=True, slots=True)
class Found:
    """What is in the store.

    Attributes:
        manifest: the stream's; None where there is none yet.
        listing: the chunks that are not retired.
        sizes: bytes of each object right under the URL, by name.
        end: None where the stream has not ended.
    """

    manifest: Manifest | None
    listing: Listing
    sizes: Mapping[str, int]
    end: End | None

    @property
    def chunks(self) -> int:
        """Chunks published ever."""
        return self.listing.sealed

    @property
    def unsealed(self) -> list[str]:
        """Names of data objects and side files without a seal: what a producer was about to publish when it stopped."""
        kinds = (self.listing.data, self.listing.arrays)
        return [name for names in kinds for chunk, name in sorted(names.items()) if chunk not in self.listing.seals]


def get(store: ObjectStore, tries: Tries, name: str) -> bytes | None:
    """Returns an object, None where there is none. Raises as `Tries` does."""
    try:
        return tries(lambda: store.get(name))
    except FileNotFoundError:
        return None


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


def names_in(store: ObjectStore, tries: Tries, folder: str = "") -> dict[str, int]:
    """Returns the names right under a folder with their sizes, nothing where there is none. Raises as `Tries` does."""
    try:
        return tries(lambda: store.list(folder))
    except FileNotFoundError:
        return {}


def look(store: ObjectStore, tries: Tries, samples_per_chunk: int | None) -> Found:
    """Looks at a stream in a store.

    Args:
        store: of the stream.
        tries: calls it.
        samples_per_chunk: what is asked for; None takes what the manifest says.

    Raises:
        StreamMismatch: the stream has another number of samples per chunk.
        StreamInvalid, ChunkMissing: its objects contradict each other, or somebody else made them.
        FormatInvalid: one of them cannot be used.
        StoreRefused, StoreUnavailable: see `Tries`.
    """
    url = store.url
    data = get(store, tries, MANIFEST)
    manifest = None if data is None else Manifest.decode(data, store.name_of(MANIFEST))
    if manifest is not None and samples_per_chunk not in (None, manifest.samples_per_chunk):
        raise StreamMismatch(
            f"{url}: the stream has {manifest.samples_per_chunk} samples per chunk, asked for {samples_per_chunk}; "
            f"that never changes. Use {manifest.samples_per_chunk}, or another place",
            directory=url,
            expected=str(samples_per_chunk),
            actual=str(manifest.samples_per_chunk),
        )
    sizes = names_in(store, tries)
    listing = sort_names(sizes, url)
    if manifest is None and (listing.data or listing.seals):
        raise StreamInvalid(
            f"{url}: holds chunk objects but no {MANIFEST}, so somebody else made them; choose another place",
            directory=url,
        )
    if manifest is None or not manifest.arrays:
        # Whatever has the name of a side file here is none of ours.
        listing = changed(listing, arrays={})
    # After the listing: the mark comes before each deletion, so whatever was missing above is below it now.
    mark = get(store, tries, RETIRED)
    if manifest is not None and mark is not None:
        retired = Retired.decode(mark, store.name_of(RETIRED))
        if retired.stream_id == manifest.stream_id:
            listing = listing.starting_at(retired.chunks_before)
    _check_gaps(url, listing, manifest is not None and manifest.arrays)
    data = get(store, tries, END)
    return Found(manifest, listing, sizes, None if data is None else End.decode(data, store.name_of(END)))


def _check_gaps(url: str, listing: Listing, arrays: bool) -> None:
    beyond = [chunk for chunk in listing.seals if chunk >= listing.sealed]
    if beyond or listing.sealed == listing.first > 0:
        raise StreamInvalid(
            f"{url}: {seal_name(listing.sealed)} is missing; restore it from a copy, no producer goes on past a gap",
            directory=url,
            chunk=listing.sealed,
        )
    for chunk in range(listing.first if arrays else listing.complete, listing.sealed):
        for kind, names, name in (
            ("data object", listing.data, chunk_name(chunk)),
            *((("side file", listing.arrays, arrays_name(chunk)),) if arrays else ()),
        ):
            if chunk not in names:
                raise ChunkMissing(
                    f"{url}/{name}: sealed, but its {kind} is missing; restore it from a copy",
                    file=f"{url}/{name}",
                    chunk=chunk,
                )


class FoundOwner(NamedTuple):
    """What is in the store as the owner.

    Attributes:
        owner: None where there is none, or none that can be read.
        tag: of the object; None where there is none.
    """

    owner: Owner | None
    tag: str | None


def find_owner(store: ObjectStore, tries: Tries) -> FoundOwner:
    """Returns the owner in the store. Raises as `Tries` does."""
    try:
        data, tag = tries(lambda: store.get_tagged(OWNER))
    except FileNotFoundError:
        return FoundOwner(None, None)
    try:
        return FoundOwner(Owner.decode(data, store.name_of(OWNER)), tag)
    except FileInvalid:
        return FoundOwner(None, tag)


def next_owner(before: Owner | None, now: float) -> Owner:
    """Returns this process as the owner after another one; `now` is in seconds since 1970."""
    return Owner(
        epoch=before.epoch + 1 if before else 1,
        token=secrets.token_hex(8),
        host=socket.gethostname() or "unknown",
        pid=os.getpid(),
        since=now,
    )


class Ownership:
    """The right to put to the stream."""

    def __init__(self, store: ObjectStore, tries: Tries, owner: Owner) -> None:
        self._store = store
        self._tries = tries
        self.owner = owner

    def take(self, found: FoundOwner) -> None:
        """Takes the stream from whoever had it when it was looked at.

        Raises:
            ProducerFenced: somebody else has taken it since that look.
        """
        data, tag = self.owner.encode(), found.tag
        if tag is None:
            taken = self._tries(lambda: self._store.put_new(OWNER, data))
        else:
            taken = self._tries(lambda: self._store.put_matching(OWNER, data, tag))
        # A try whose answer was lost may have done it.
        if not taken or not self._store.conditional:
            self.check()

    def check(self) -> None:
        """Looks whether the stream is still ours.

        Raises:
            ProducerFenced: another producer has taken it over, or the object is gone.
        """
        found = find_owner(self._store, self._tries)
        if found.owner == self.owner:
            return
        url = self._store.url
        if found.owner is None:
            raise ProducerFenced(
                f"{self._store.name_of(OWNER)}: is gone or cannot be read: somebody removes the stream, or has changed "
                f"that object; this producer stops, since it cannot know any more whether the stream is its own. If "
                f"the stream is still wanted, start it again: it goes on after the last sealed chunk",
                directory=url,
            )
        raise ProducerFenced(
            f"{url}: {found.owner} has taken this stream over; this producer stops. Nothing is lost: the other one "
            f"goes on after the last sealed chunk",
            directory=url,
            holder=str(found.owner),
        )
