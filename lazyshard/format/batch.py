"""Checks many lines together: as strictly as one by one, in a third of the time.

Only parsing is done line by line. All other checks scan the text of all lines in one pass, with tests that may flag a
valid row but never miss an invalid one; flagged rows are checked individually.

A pack is a row of whole samples that are trained together, one after the other, with exactly these keys:
`{"pack": [ROW, ROW, ...], "lengths": [TOKENS, TOKENS, ...]}`. The arrays of its rows are stored one after the other in
the side file, and their offsets in the pack count from the first of these bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any, Final, NamedTuple

import numpy as np
import orjson
import xxhash

from lazyshard.errors import RowInvalid
from lazyshard.format.arrays import may_hold_arrays, move_arrays, refuse_array_key
from lazyshard.format.row import check_line, check_row, count_keys, has_duplicate_keys
from lazyshard.memory import loads, quick_loads
from lazyshard.part import Array, ByteArray, Int64Array, UInt32Array, UInt64Array

# Lines parsed together: few enough that their objects stay in the processor's cache and do not survive a collection of
# Python's garbage collector
_GROUP: Final = 32

# Text scanned at once: below the size for which malloc maps new memory (128 KiB), since fresh pages are slow
_WINDOW_BYTES: Final = 96 << 10

_BLANK, _COLON, _NEWLINE, _QUOTE = b' :\n"'

_NIBBLES: Final = np.uint64(0xF0F0F0F0F0F0F0F0)
_DIGITS: Final = np.uint64(0x3030303030303030)
# A number that does not fit into 64 bits has at least 19 digits. They fill two aligned words of 8 bytes, or one word
# and at least 4 bytes on its two sides.
_ADJACENT: Final = np.array([-4, -3, -2, -1, 8, 9, 10, 11])


class CheckedArrays(NamedTuple):
    """The arrays of rows: their bytes in the side file; for each row the end of its bytes and their digest."""

    data: bytes
    ends: UInt64Array
    digests: UInt64Array


@dataclass(frozen=True, slots=True, eq=False)
class CheckedLines:
    """Lines that were checked to be rows, ready to be published. Can be pickled."""

    data: bytes  # the rows one after the other, each with its newline
    ends: UInt64Array  # u64 of shape (rows,): row i ends before byte ends[i] of the data
    digests: UInt64Array  # u64 of shape (rows,): as in a `Seal`
    duplicates: tuple[int, ...] = ()  # indices of rows in which an object has a key twice
    # the error of the line after these rows, with its `index`; None if all lines are rows
    refused: RowInvalid | None = None
    # u32 of shape (rows,): length of each sample in tokens, None if not measured
    tokens: UInt32Array | None = None
    arrays: CheckedArrays | None = None  # the arrays of the rows; None in a stream without arrays
    patches: UInt32Array | None = None  # u32 of shape (rows,): patches of each sample's images, None if none has any

    def __len__(self) -> int:
        """Number of rows."""
        return len(self.digests)


def check_lines(lines: Sequence[bytes]) -> CheckedLines:
    """Checks lines, with or without line ends, up to the first that is not a row: see `CheckedLines.refused`.

    Batches of about 1 MiB are fastest.
    """
    if lines and not lines[0].endswith(b"}\n"):
        # If the first line has another line end, most have; each line gets one newline.
        lines = [line.rstrip(b"\r\n") + b"\n" for line in lines]
    keys, parsed = _parse(lines)
    found = _check_parsed(lines[:parsed], keys)
    if found is None:
        # Other line ends than one newline, or a line end within a row.
        return _check_each(lines, 0)
    if found.refused is None and parsed < len(lines):
        other = _check_each(lines[parsed:], parsed)
        ends = np.concatenate((found.ends, other.ends + np.uint64(len(found.data))))
        digests, duplicates = np.concatenate((found.digests, other.digests)), found.duplicates + other.duplicates
        return CheckedLines(found.data + other.data, ends, digests, duplicates, other.refused)
    return found


def without_array_keys(rows: CheckedLines) -> CheckedLines:
    """Returns rows up to the first with the key reserved for arrays, which a stream with arrays refuses."""
    if not may_hold_arrays(rows.data):
        return rows
    for index, (start, end) in enumerate(pairwise([0, *rows.ends.tolist()])):
        if may_hold_arrays(rows.data[start:end]):
            try:
                refuse_array_key(loads(rows.data[start:end]))
            except RowInvalid as refused:
                refused.index = index
                tokens, patches = (None if one is None else one[:index] for one in (rows.tokens, rows.patches))
                duplicates = tuple(at for at in rows.duplicates if at < index)
                ends, digests = rows.ends[:index], rows.digests[:index]
                return CheckedLines(rows.data[:start], ends, digests, duplicates, refused, tokens, patches=patches)
    return rows


def _parse(lines: Sequence[bytes]) -> tuple[list[int], int]:
    """Parses groups of lines, up to the first group with a line that is not an object.

    Returns for each group how many keys its objects have, or fewer if they are nested unlike the group's first; and how
    many lines were parsed.
    """
    keys: list[int] = []
    for start in range(0, len(lines), _GROUP):
        try:
            rows = list(map(quick_loads, lines[start : start + _GROUP]))
        except orjson.JSONDecodeError:
            return keys, start
        if set(map(type, rows)) != {dict}:
            return keys, start
        flat = _count_flat(rows[:1]) == count_keys(rows[0])
        keys.append(_count_flat(rows) if flat else sum(map(count_keys, rows)))
    return keys, len(lines)


def _count_flat(rows: list[dict[str, Any]]) -> int:
    """Returns the number of keys of rows and of objects in lists directly in the rows, as in chat data."""
    count = 0
    for row in rows:
        count += len(row)
        for value in row.values():
            if type(value) is list:
                for item in value:
                    if type(item) is dict:
                        count += len(item)
    return count


def _check_parsed(lines: Sequence[bytes], keys: list[int]) -> CheckedLines | None:
    """Checks lines that parse to objects; None if one is not a single line ended by a newline."""
    data = b"".join(lines)
    ends = _ends(lines, np.int64)
    text = np.frombuffer(data, np.uint8)
    controls, colons, words = _scan(text)
    # The newline of each row is the only control character, except for tabs between tokens.
    if controls != len(lines):
        controls -= data.count(b"\t")
    if controls != len(lines) or (text[ends - 1] != _NEWLINE).any():
        return None
    for index in np.unique(np.searchsorted(ends, _long_numbers(text, words), side="right")).tolist():
        try:
            check_row(lines[index])
        except RowInvalid as refused:
            refused.index = index
            return replace(check_lines(lines[:index]), refused=refused)
    # Every member has a colon, so if there are no more colons than remaining keys, no member was dropped.
    duplicates = () if colons == sum(keys) else tuple(_find_duplicates(lines, text, ends, keys))
    return CheckedLines(data, ends.astype(np.uint64), _digests(lines), duplicates)


def _ends(parts: Sequence[bytes], dtype: type = np.uint64) -> Array:
    """Returns the end of each part in their concatenation."""
    return np.cumsum(np.fromiter(map(len, parts), dtype, len(parts)), dtype=dtype)


def _digests(parts: Sequence[bytes]) -> UInt64Array:
    return np.fromiter(map(xxhash.xxh3_64_intdigest, parts), np.uint64, len(parts))


def _scan(text: ByteArray) -> tuple[int, int, Int64Array]:
    """Returns the number of control characters and of colons, and the positions of words of about 8 digits."""
    controls = colons = 0
    places: list[Int64Array] = []
    found = np.empty(_WINDOW_BYTES, np.bool_)
    masked = np.empty(_WINDOW_BYTES // 8, np.uint64)
    for start in range(0, len(text), _WINDOW_BYTES):
        window = text[start : start + _WINDOW_BYTES]
        controls += int(np.count_nonzero(np.less(window, _BLANK, out=found[: len(window)])))
        colons += int(np.count_nonzero(np.equal(window, _COLON, out=found[: len(window)])))
        words = window[: len(window) // 8 * 8].view(np.uint64)
        np.bitwise_and(words, _NIBBLES, out=masked[: len(words)])
        if np.equal(masked[: len(words)], _DIGITS, out=found[: len(words)]).any():
            places.append(np.flatnonzero(found[: len(words)]) * 8 + start)
    return controls, colons, np.concatenate(places) if places else np.empty(0, np.int64)


def _long_numbers(text: ByteArray, words: Int64Array) -> Int64Array:
    """Returns the words that may belong to a number of 19 digits."""
    if not len(words):
        return words
    adjacent = (text[np.clip(words[:, None] + _ADJACENT, 0, len(text) - 1)] & 0xF0) == 0x30
    followed = np.diff(words, append=-1) == 8
    long: Int64Array = words[followed | adjacent.all(axis=1)]
    return long


def _find_duplicates(lines: Sequence[bytes], text: ByteArray, ends: Int64Array, keys: list[int]) -> Iterator[int]:
    """Yields the indices of rows in which an object has a key twice."""
    colons = np.flatnonzero(text == _COLON)
    before = text[colons - 1]
    members = colons[before == _QUOTE]
    # A colon after whitespace may also belong to a key.
    apart = colons[before <= _BLANK]
    apart = apart[(text[apart - 2] == _QUOTE) | (text[apart - 2] <= _BLANK)]
    last = np.minimum(np.arange(1, len(keys) + 1) * _GROUP, len(lines)) - 1
    doubtful = np.diff(np.searchsorted(members, ends[last]), prepend=0) != np.asarray(keys)
    doubtful |= np.diff(np.searchsorted(apart, ends[last]), prepend=0) > 0
    for group in np.flatnonzero(doubtful).tolist():
        for index in range(group * _GROUP, min(len(lines), (group + 1) * _GROUP)):
            if has_duplicate_keys(lines[index], loads(lines[index])):
                yield index


def _check_each(lines: Sequence[bytes], first: int) -> CheckedLines:
    """Checks lines one by one; `first` is the index of the first line."""
    rows: list[bytes] = []
    duplicates: list[int] = []
    refused = None
    for index, line in enumerate(lines):
        try:
            row, parsed = check_line(line)
        except RowInvalid as error:
            error.index = first + index
            refused = error
            break
        rows.append(row)
        if has_duplicate_keys(row, parsed):
            duplicates.append(first + index)
    return CheckedLines(b"".join(rows), _ends(rows), _digests(rows), tuple(duplicates), refused)


class EncodedRow(NamedTuple):
    """A row of `pack_row`, its length in tokens and its patches, None if unknown. Sent between processes."""

    line: bytes
    arrays: bytes
    tokens: int | None = None
    patches: int | None = 0

    @property
    def data(self) -> bytes:
        """All bytes of the row, for a digest."""
        return self.line + self.arrays


def check_encoded(rows: Sequence[EncodedRow]) -> CheckedLines:
    """Checks lines as `check_lines` does, and adds their arrays, patches, and their lengths if all rows have one."""
    checked = check_lines([row.line for row in rows])
    rows = rows[: len(checked)]
    tokens, parts = [row.tokens for row in rows if row.tokens is not None], [row.arrays for row in rows]
    known = np.array(tokens, np.uint32) if len(tokens) == len(rows) else None
    patches = np.array([row.patches or 0 for row in rows], np.uint32)
    arrays = CheckedArrays(b"".join(parts), _ends(parts), _digests(parts))
    return replace(checked, tokens=known, arrays=arrays, patches=patches if patches.any() else None)


ADDED_LEVELS: Final = 2  # Levels of nesting that a pack adds to a row: readers accept at most 1,024


class EncodedPack(NamedTuple):
    """The samples of a pack, in order, and the number of tokens of each."""

    rows: list[dict[str, Any]]
    lengths: list[int]


def encode_pack(lines: Sequence[bytes], lengths: Sequence[int]) -> bytes:
    """Returns the line of a pack of one or more checked rows, given their lines and the number of tokens of each.

    The bytes of the rows are not changed.
    """
    rows = b",".join(line.rstrip(b"\r\n") for line in lines)
    return b'{"pack":[' + rows + b'],"lengths":' + orjson.dumps(list(lengths)) + b"}\n"


def encode_encoded_pack(rows: Sequence[EncodedRow], lengths: Sequence[int]) -> EncodedRow:
    """Returns the pack of rows with arrays. Only the offsets of the arrays are changed."""
    before = [0, *accumulate(len(row.arrays) for row in rows)]
    lines = [move_arrays(row.line, by) for row, by in zip(rows, before, strict=False)]
    return EncodedRow(encode_pack(lines, lengths), b"".join(row.arrays for row in rows), sum(lengths))


def decode_pack(row: dict[str, Any]) -> EncodedPack | None:
    """Returns the pack that a row represents, None for any other row."""
    rows, lengths = row.get("pack"), row.get("lengths")
    if len(row) != 2 or type(rows) is not list or type(lengths) is not list or not rows or len(rows) != len(lengths):
        return None
    if any(type(one) is not dict for one in rows) or any(type(length) is not int or length < 1 for length in lengths):
        return None
    return EncodedPack(rows, lengths)
