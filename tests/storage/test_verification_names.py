"""What a verification finds in names alone."""

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from lazyshard.format.names import chunk_name, seal_name
from lazyshard.storage.verification_names import ChunkNames, Extent, leftovers, missing_chunks, sort_names
from lazyshard.storage.verification_plan import LAGGING, plan_batches


def names_of(data: set[int], seals: set[int]) -> ChunkNames:
    return sort_names([*map(chunk_name, data), *map(seal_name, seals)], native=True)


def extent(first: int = 0, stop: int = 3, *, native: bool = True, ended: bool = False, running: bool = False) -> Extent:
    return Extent(first, stop, native, ended, running)


def test_names_that_are_no_chunks_are_passed_over() -> None:
    found = [
        "stream.json",
        "chunk_00000.jsonl.gz",
        "chunk_.jsonl",
        "xchunk_00000.jsonl",
        "chunk_00000.jsonl.completed.1",
    ]
    assert sort_names(found, native=True) == ChunkNames({}, {}, ())


def test_chunks_past_five_digits() -> None:
    names = sort_names(["chunk_100000.jsonl", "chunk_100000.jsonl.completed"], native=True)
    assert names == ChunkNames({100000: "chunk_100000.jsonl"}, {100000: "chunk_100000.jsonl.completed"}, ())
    assert names.sealed_before == 100001


def test_padding_is_free_in_a_foreign_directory() -> None:
    names = sort_names(["chunk_7.jsonl", "chunk_007.jsonl.completed"], native=False)
    assert names == ChunkNames({7: "chunk_7.jsonl"}, {7: "chunk_007.jsonl.completed"}, ())


def test_three_files_for_a_chunk() -> None:
    [finding] = sort_names(["chunk_7.jsonl", "chunk_007.jsonl", "chunk_00007.jsonl"], native=False).findings
    assert str(finding) == (
        "chunk_00007.jsonl: expected one file for chunk 7, found also chunk_007.jsonl, chunk_7.jsonl; keep the right "
        "one and move the other out of the directory"
    )


chunks = st.sets(st.integers(0, 12))


@given(data=chunks, seals=chunks, there=chunks, first=st.integers(0, 12), count=st.integers(0, 12))
def test_missing_chunks_are_told_once_each(
    data: set[int], seals: set[int], there: set[int], first: int, count: int
) -> None:
    """Against a list: each published chunk of which nothing is there is in exactly one gap, and no other is."""
    stop = first + count
    found = list(missing_chunks(names_of(data, seals), extent(first, stop), {}, there))
    told: list[int] = []
    for finding in found:
        words = finding.expected.split()
        assert finding.chunk is not None
        told += range(finding.chunk, int(words[4]) + 1) if words[1] == "chunks" else [finding.chunk]
    assert told == [chunk for chunk in range(first, stop) if chunk not in data | seals | there]


@given(data=chunks, seals=chunks, first=st.integers(0, 6), count=st.integers(0, 6))
def test_each_file_is_looked_at_or_left_over(data: set[int], seals: set[int], first: int, count: int) -> None:
    names, stop = names_of(data, seals), first + count
    looked_at = [
        files.chunk
        for batch in plan_batches(Path(), names, extent(first, stop), 1000, quick=False)
        for files in batch.files
    ]
    # So few are all among the newest, which are looked for by name.
    assert count < LAGGING
    assert looked_at == list(range(first, stop))
    told = {(finding.file, finding.kind) for finding in leftovers(names, extent(first, stop))}
    assert told == (
        {(chunk_name(chunk), "retired") for chunk in data if chunk < first}
        | {(seal_name(chunk), "retired") for chunk in seals if chunk < first}
        | {(chunk_name(chunk), "unpublished") for chunk in data - seals if chunk >= stop}
        | {(seal_name(chunk), "beyond-end") for chunk in seals if chunk >= stop}
    )
    assert not list(leftovers(names, extent(first, stop, running=True)))


def test_only_the_newest_chunks_are_looked_for_unlisted() -> None:
    batches = plan_batches(Path(), names_of({3}, {3}), extent(0, 10**15), 4096, quick=False)
    looked_at = [files.chunk for batch in batches for files in batch.files]
    assert looked_at == [3, *range(10**15 - LAGGING, 10**15)]


def test_batches_are_of_chunks_or_rows() -> None:
    names = names_of(set(range(200)), set(range(200)))

    def sizes(per_chunk: int | None, *, quick: bool) -> list[int]:
        batches = plan_batches(Path(), names, extent(0, 200), per_chunk, quick=quick)
        return [len(batch.files) for batch in batches]

    assert sizes(10, quick=False) == [64, 64, 64, 8]
    assert sizes(1000, quick=False) == [4] * 50
    assert sizes(10**8, quick=False) == [1] * 200
    assert sizes(None, quick=False) == [1] * 200
    assert sizes(10**8, quick=True) == [64, 64, 64, 8]
