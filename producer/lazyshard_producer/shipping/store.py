"""A stream in an object store: what is in it, who may put to it, and calls that are repeated until the store does them.

The object `stream.owner` is taken under a condition. A start always takes the stream over, as it does in a directory:
there is no lease to wait for, and nothing to renew. The one that was there before finds itself fenced at its next look,
and could not publish a chunk twice if it did not look: a seal is put only where there is none.
"""

from __future__ import annotations

import os
import secrets
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Final, NamedTuple, ParamSpec, TypeVar

from lazyshard.errors import ChunkMissing, FileInvalid, ProducerFenced, StoreUnavailable, StreamInvalid, StreamMismatch
from lazyshard.format.names import END, MANIFEST, OWNER, RETIRED, arrays_name, chunk_name, seal_name
from lazyshard.format.records import End, Manifest, Owner, Retired
from lazyshard.store.objects import FIRST_PAUSE_S, ObjectStore, next_pause, why_failed
from lazyshard.stream.listing import Listing, sort_names

_P = ParamSpec("_P")
_T = TypeVar("_T")

SHOWN_S: Final = 2.0  # a failure that passes sooner is nobody's concern
_TURNS: Final = 10  # an object is another one than before only if somebody put it in between: not so often in a row


class GivenUp(Exception):
    """A call was broken off by whoever wanted it."""


class FoundOwner(NamedTuple):
    """The owner in the store, None where none can be read, and the tag of its object, None where there is none."""

    owner: Owner | None
    tag: str | None


class StreamStore:
    """The objects of a stream. `owner` is this process, once it has taken the stream.

    Repeats what fails. `ObjectStore` could too, but here others want to know meanwhile since when and why, and to break
    it off: `pause` waits for so many seconds, and returns True where it is to be given up. Then all methods raise
    GivenUp, and StoreUnavailable where the store has failed for `patience_s`.
    """

    def __init__(
        self,
        url: str,
        patience_s: float,
        left_in: str,
        pause: Callable[[float], bool],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.objects = ObjectStore(url, patience_s=0)
        self.url = self.objects.url
        self.owner: Owner | None = None
        self.pause = pause
        self._patience_s, self._left_in, self._clock = patience_s, left_in, clock
        self._since: float | None = None
        self._words = ""

    @property
    def trouble(self) -> str | None:
        """Why nothing comes through, for how long, in words; None where it does, and in the first moments."""
        since = self._since
        if since is None or (lasted := self._clock() - since) < SHOWN_S:
            return None
        return f"the store has not answered for {lasted:.0f} s ({self._words})"

    def call(self, call: Callable[_P, _T], *args: _P.args, **options: _P.kwargs) -> _T:
        """Returns what a method of `objects` returns."""
        started, length = self._clock(), FIRST_PAUSE_S
        while True:
            try:
                result = call(*args, **options)
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
                    f"{self.url}: the store has failed for {waited:.0f} s (--store-patience-seconds "
                    f"{self._patience_s:g}): {self._words}. Is it reachable from this machine, and its endpoint right "
                    f"(AWS_ENDPOINT_URL for S3)? {self._left_in}",
                    url=self.url,
                    waited=waited,
                ) from cause
            if self.pause(length):
                raise GivenUp
            length = next_pause(length)

    def get(self, name: str) -> bytes | None:
        """Returns an object, None where there is none."""
        try:
            return self.call(self.objects.get, name)
        except FileNotFoundError:
            return None

    def names(self, folder: str = "") -> dict[str, int]:
        """Returns the names right under a folder with their sizes, nothing where there is none."""
        try:
            return self.call(self.objects.list, folder)
        except FileNotFoundError:
            return {}

    def put_new(self, name: str, data: bytes) -> bool:
        """Puts an object if there is none; returns whether it did."""
        return self.call(self.objects.put_new, name, data)

    def delete(self, *names: str) -> None:
        """Deletes objects, if the stream is still ours."""
        if names:
            self.check_owner()
        for name in names:
            self.call(self.objects.delete, name)

    def replace(self, name: str, data: bytes) -> bytes | None:
        """Puts an object in place of the one of its name, unless it is the same; returns that one.

        One that is fenced meanwhile cannot overwrite what its successor has put: the tag is older than its look at the
        owner.
        """
        for _ in range(_TURNS):
            found, tag = self._tagged(name)
            if found == data:
                return None
            self.check_owner()
            if tag is None:
                if self.put_new(name, data):
                    return None
            elif self.call(self.objects.put_matching, name, data, tag):
                return found
        raise self.invalid(name, "somebody else puts this object all the time; find out who, and stop it")

    def find_owner(self) -> FoundOwner:
        """Looks who the owner is."""
        data, tag = self._tagged(OWNER)
        try:
            return FoundOwner(None if data is None else Owner.decode(data, self.objects.name_of(OWNER)), tag)
        except FileInvalid:
            return FoundOwner(None, tag)

    def take(self, owner: Owner, found: FoundOwner) -> None:
        """Takes the stream from whoever had it when it was looked at."""
        self.owner = owner
        data, tag = owner.encode(), found.tag
        taken = self.put_new(OWNER, data) if tag is None else self.call(self.objects.put_matching, OWNER, data, tag)
        # A try whose answer was lost may have done it.
        if not taken or not self.objects.conditional:
            self.check_owner()

    def check_owner(self) -> None:
        """Looks whether the stream is still ours."""
        found = self.find_owner().owner
        if found == self.owner:
            return
        why = f"{found} has taken this stream over; this producer stops. Nothing is lost: the other one goes on"
        if found is None:
            why = (
                f"{OWNER} is gone or cannot be read: somebody removes the stream, or has changed that object; this "
                f"producer stops. If the stream is still wanted, start it again: it goes on"
            )
        holder = None if found is None else str(found)
        raise ProducerFenced(f"{self.url}: {why} after the last sealed chunk", directory=self.url, holder=holder)

    def invalid(self, name: str, why: str, chunk: int | None = None) -> StreamInvalid:
        """Returns the error of an object, or of the stream where it has no name."""
        return StreamInvalid(f"{self.objects.name_of(name)}: {why}", directory=self.url, chunk=chunk)

    def _tagged(self, name: str) -> tuple[bytes, str] | tuple[None, None]:
        try:
            return self.call(self.objects.get_tagged, name)
        except FileNotFoundError:
            return None, None


def next_owner(before: Owner | None) -> Owner:
    """Returns this process as the owner after another one."""
    epoch = before.epoch + 1 if before else 1
    return Owner(epoch, secrets.token_hex(8), socket.gethostname() or "unknown", os.getpid(), time.time())


@dataclass(frozen=True, slots=True)
class Found:
    """What is in the store: the manifest if there is one, the chunks that are not retired, sizes by name, the end."""

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


def look(store: StreamStore, samples_per_chunk: int | None) -> Found:
    """Looks at a stream, of which so many samples per chunk are asked for; None takes what the manifest says."""
    url = store.url
    data = store.get(MANIFEST)
    manifest = None if data is None else Manifest.decode(data, store.objects.name_of(MANIFEST))
    if manifest is not None and samples_per_chunk not in (None, manifest.samples_per_chunk):
        raise StreamMismatch(
            f"{url}: the stream has {manifest.samples_per_chunk} samples per chunk, asked for {samples_per_chunk}; "
            f"that never changes. Use {manifest.samples_per_chunk}, or another place",
            directory=url,
            expected=str(samples_per_chunk),
            actual=str(manifest.samples_per_chunk),
        )
    sizes = store.names()
    listing = sort_names(sizes, url)
    if manifest is None and (listing.data or listing.seals):
        raise store.invalid("", f"holds chunk objects but no {MANIFEST}, so somebody else made them; use another place")
    arrays = manifest is not None and manifest.arrays
    if not arrays:
        # Whatever has the name of a side file here is none of ours.
        listing = replace(listing, arrays={})
    # After the listing: the mark comes before each deletion, so whatever was missing above is below it now.
    mark = store.get(RETIRED)
    if manifest is not None and mark is not None:
        retired = Retired.decode(mark, store.objects.name_of(RETIRED))
        if retired.stream_id == manifest.stream_id:
            listing = listing.starting_at(retired.chunks_before)
    sealed = listing.sealed
    if any(chunk >= sealed for chunk in listing.seals) or sealed == listing.first > 0:
        gap = f"{seal_name(sealed)} is missing; restore it from a copy, no producer goes on past a gap"
        raise store.invalid("", gap, sealed)
    kinds = [("data object", listing.data, chunk_name), ("side file", listing.arrays, arrays_name)][: 1 + arrays]
    for chunk in range(listing.first if arrays else listing.complete, sealed):
        for kind, names, name_of in kinds:
            if chunk not in names:
                file = f"{url}/{name_of(chunk)}"
                why = f"sealed, but its {kind} is missing; restore it from a copy"
                raise ChunkMissing(f"{file}: {why}", file=file, chunk=chunk)
    data = store.get(END)
    return Found(manifest, listing, sizes, None if data is None else End.decode(data, store.objects.name_of(END)))
