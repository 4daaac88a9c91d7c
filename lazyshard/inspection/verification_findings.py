"""What a verification finds: one fault of one file, what it should be, and what to do."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, Literal

Severity = Literal["damage", "unchecked", "leftover"]
"""damage: what is published is not as it was published; unchecked: this process could not look; leftover: what a crash
leaves behind, and a producer's next start puts right."""

RESTORE: Final = "restore the file from a copy"
REMOVED: Final = "nothing to do: the producer's next start removes it"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A fault.

    Attributes:
        severity: what it means for the stream.
        kind: a word for programs; `docs/checking.md` lists them.
        file: its name in the stream's directory.
        expected: what should be there.
        found: what is there.
        remedy: what to do.
        chunk: the chunk's number, None for a file that belongs to none.
        field: the field of the file that is meant, None where it is the file or a row.
        row: the first bad row, None where the whole file is meant.
        byte: where that row starts in the file.
        rows: how many rows are bad in this way; 0 where the whole file is meant.
    """

    severity: Severity
    kind: str
    file: str
    expected: str
    found: str
    remedy: str
    chunk: int | None = None
    field: str | None = None
    row: int | None = None
    byte: int | None = None
    rows: int = 0

    def __str__(self) -> str:
        """Returns it in one sentence."""
        where = self.file
        if self.row is not None:
            more = f" and {self.rows - 1:,} more" if self.rows > 1 else ""
            where += f": row {self.row} (byte {self.byte}){more}"
        elif self.field is not None:
            where += f": field {self.field!r}"
        return f"{where}: expected {self.expected}, found {self.found}; {self.remedy}"


def in_order(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Returns findings in the order of a report: of the stream itself, then chunk by chunk."""
    return tuple(sorted(findings, key=_key))


def _key(finding: Finding) -> tuple[int, str, int, str]:
    chunk = -1 if finding.chunk is None else finding.chunk
    return chunk, finding.file, -1 if finding.row is None else finding.row, finding.kind
