"""What is in the store of a stream: looked at once, by whoever is about to go on with it. O(chunks), by listing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from lazyshard.errors import ChunkMissing, StreamInvalid, StreamMismatch
from lazyshard.format import End, Manifest
from lazyshard.format.names import END, MANIFEST, RETIRED, arrays_name, chunk_name, seal_name
from lazyshard.format.retired import Retired
from lazyshard.store.objects import ObjectStore
from lazyshard.stream.listing import Listing, sort_names
from lazyshard_producer.shipping.tries import Tries


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
        listing = replace(listing, arrays={})
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
