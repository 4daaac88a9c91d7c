"""Where the rows of a data file are that another program has written, without a seal."""

from __future__ import annotations

import os
from array import array
from collections.abc import Callable
from typing import Final

from lazyshard.errors import ChunkCorrupt
from lazyshard.store.files import OpenFile

_SCAN_BYTES: Final = 1 << 20

MAX_ROW_BYTES: Final = 1 << 31
"""No program makes rows as large; a file with a hole can claim any number of bytes at no cost."""

_BOM: Final = b"\xef\xbb\xbf"

BLANKS: Final = b" \t\r\n"
"""What JSON takes for white space."""


def find_rows(file: OpenFile, number: int) -> array[int]:
    """Returns where the rows of a file start, and the end of the last one, by one scan in bounded memory.

    Blank lines count as part of the row before them, in front of all rows as part of the first. A byte order mark at
    the start is passed over. The last line may lack its newline.

    Args:
        file: the data file.
        number: the chunk's number.

    Raises:
        ChunkCorrupt: a line has no end.
        OSError: the filesystem failed.
    """
    position = len(_BOM) if os.pread(file.fd, len(_BOM), 0) == _BOM else 0
    offsets = array("Q", [position])
    blank = True
    while block := os.pread(file.fd, _SCAN_BYTES, position):
        start = 0
        while (newline := block.find(b"\n", start)) >= 0:
            blank = blank and not block[start:newline].strip(BLANKS)
            if not blank:
                offsets.append(position + newline + 1)
            elif len(offsets) > 1:
                offsets[-1] = position + newline + 1
            blank = True
            start = newline + 1
        blank = blank and not block[start:].strip(BLANKS)
        position += len(block)
        if position - offsets[-1] > MAX_ROW_BYTES:
            # The zeros of a hole, for instance, of which there may be more than can ever be read.
            raise ChunkCorrupt(
                f"{file.path}: row {len(offsets) - 1} (byte {offsets[-1]}): expected a line of at most "
                f"{MAX_ROW_BYTES} bytes, found no end of it; restore the file from a copy",
                file=str(file.path),
                chunk=number,
                row=len(offsets) - 1,
                byte=offsets[-1],
                expected=f"a line of at most {MAX_ROW_BYTES} bytes",
                actual="no end of it",
            )
    if blank:
        offsets[-1] = position
    else:
        offsets.append(position)
    return offsets


def line_number(line: bytes, start: int, read: Callable[[int, int], bytes]) -> int:
    """Returns at which line of the file, counted from 1, a row lies: blank lines before it count.

    Args:
        line: the row's bytes, with the blank lines in front of it.
        start: the byte at which they start.
        read: returns bytes of the file, from a place on and so many.
    """
    number = 1 + line[: len(line) - len(line.lstrip(BLANKS))].count(b"\n")
    for position in range(0, start, _SCAN_BYTES):
        number += read(position, min(_SCAN_BYTES, start - position)).count(b"\n")
    return number
