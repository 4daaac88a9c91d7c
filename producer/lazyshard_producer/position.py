"""Positions: how far a run has come, as values. They are stored in seals, so a publish advances them.

The `source` of a seal is the value of `RunPosition.encode`: a version, the entry of every given source in order,
including sources not begun, and the fields of `RunPosition`, with `lead` and `cut` only if they are not 0. The contents
of an entry are defined by the kind of source. Unknown fields are ignored, a later version is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import zip_longest
from typing import Annotated, Any, Final, NamedTuple, TypeAlias

import orjson
import xxhash
from pydantic import Field, TypeAdapter, ValidationError

from lazyshard.errors import StreamMismatch, redact
from lazyshard_producer.errors import SourceRefused

VERSION: Final = 1

PACKED_SIZE: Final = "packed"
"""Key of a compressed file's size in its entry, from which a later run sees, without reading, whether it has grown."""

Count: TypeAlias = Annotated[int, Field(ge=0)]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPosition:
    """A position between two published rows.

    Reading continues from `sources`. Of the rows made from there on, the first `skip` are published and are left out. A
    unit is a source row or block of which a part is published. It is made of `unit` rows of each source, even if a
    source has grown, and must come out the same, which the digest `skipped` verifies. In a unit that is balanced by
    cost, the first `lead` rows, in the order they were made, belong to the unit before. If rows are split into
    sequences, only the first `cut` tokens of the last skipped row, including its BOS, are published.

    Attributes:
        sources: the position in each source, an object made by its kind, None if it is not begun.
        skip: number of published rows made from there on.
        lead: those of them that belong to the unit before; at most `skip`.
        cut: published tokens of the last of them; 0 for all of it.
        rows, refused, duplicate: rows read up to `sources`; refused rows, and rows that contain a key twice.
        blocks: blocks of rows that were shuffled or packed so far.
        quarantine_bytes: size of `quarantine.jsonl` so far.
        drawn: if sources are mixed, rows drawn from each since a source last finished; else empty.
        finished: if sources are mixed, whether each has reached its end; else empty.
        unit: rows of each source in the unit; empty if `skip` is 0.
        skipped: XXH3 (64 bits, hexadecimal) of the skipped rows; empty if `skip` is 0.
        recipe: the settings with which rows are made, by name.
    """

    sources: tuple[dict[str, Any] | None, ...]
    skip: Count = 0
    lead: Count = 0
    cut: Count = 0
    rows: Count = 0
    refused: Count = 0
    duplicate: Count = 0
    blocks: Count = 0
    quarantine_bytes: Count = 0
    drawn: tuple[Count, ...] = ()
    finished: tuple[bool, ...] = ()
    unit: tuple[Count, ...] = ()
    skipped: str = ""
    recipe: dict[str, Any] = field(default_factory=dict)

    def encode(self, names: Sequence[str], *, end: bool = False) -> dict[str, Any]:
        """Returns the JSON value for a seal; `names` are the names of all sources, used for those not begun.

        Sizes of compressed files are included only at the `end` of all sources: before, they would depend on how far
        ahead is read, but the same rows must make the same seals.
        """
        given = [entry or {"kind": None, "path": name} for entry, name in zip(self.sources, names, strict=True)]
        entries = [{key: one[key] for key in one if end or key != PACKED_SIZE} for one in given]
        values = {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()}
        values = {name: value for name, value in values.items() if value or name not in ("lead", "cut")}
        return {"version": VERSION, **values, "sources": entries}


_READER: Final = TypeAdapter(RunPosition)


def decode_position(value: Any, directory: str) -> RunPosition:
    """Reads the value that `RunPosition.encode` returned. Raises StreamMismatch."""
    sources: Any = value.get("sources") if isinstance(value, dict) else None
    if not isinstance(sources, list):
        found = "none: another program wrote the stream"
        raise _mismatch(directory, "source positions of lazyshard-producer", found)
    if (version := value.get("version")) != VERSION:
        raise _mismatch(directory, f"source positions of version {VERSION}", f"version {version!r}")
    if not all(isinstance(entry, dict) and "kind" in entry and type(entry.get("path")) is str for entry in sources):
        raise _mismatch(directory, "a kind and a path of each source", repr(sources)[:120])
    entries = [None if entry["kind"] is None else entry for entry in sources]
    try:
        # From JSON, because in strict mode a tuple is accepted only from a JSON list.
        position = _READER.validate_json(orjson.dumps({**value, "sources": entries}), strict=True)
    except ValidationError as cause:
        first = cause.errors()[0]
        raise _mismatch(directory, "source positions", f"{first['msg']} - at {first['loc']}") from None
    skip, unit = position.skip, position.unit
    if not {len(position.drawn), len(position.finished), len(unit)} <= {0, len(sources)}:
        raise _mismatch(directory, f"counts for each of {len(sources)} sources", repr(value)[:120])
    made = bool(position.skipped and any(unit))
    if made != (skip > 0) or position.lead > skip or (position.cut and not skip):
        raise _mismatch(directory, "the unit and the digest of skipped rows", f"skip {skip}")
    return position


def _mismatch(directory: str, expected: str, actual: str) -> StreamMismatch:
    text = str(refuse_position(directory, expected, actual))
    return StreamMismatch(text, directory=directory, expected=expected, actual=actual)


def source_names(value: Any) -> list[str]:
    """Returns the paths of the sources in a value that `decode_position` has accepted."""
    return [entry["path"] for entry in value["sources"]]


def resume(position: RunPosition, committed: Sequence[str], given: Sequence[str]) -> RunPosition:
    """Returns the position to start from; sources appended to the list are at their start. Raises SourceRefused."""
    if (difference := compare_sources(committed, given)) is not None:
        number, expected, actual = difference
        text = f"source {number} was {expected}, now it is {actual}; give the sources of the first run in the same"
        advice = "order (more may follow), or another --out"
        raise SourceRefused(f"{text} {advice}", file=actual, expected=expected, actual=actual)
    more = len(given) - len(committed)
    longer: dict[str, Any] = {"sources": (*position.sources, *[None] * more)}
    # Each of these is empty, or has a value for each source.
    for name, start in (("unit", 0), ("drawn", 0), ("finished", False)):
        if old := getattr(position, name):
            longer[name] = (*old, *[start] * more)
    return replace(position, **longer)


def compare_sources(committed: Sequence[str], given: Sequence[str]) -> tuple[int, str, str] | None:
    """Returns (number from 1, path expected, path given or "missing") of the first difference, or None."""
    names = zip_longest(committed, map(plain_name, given[: len(committed)]), fillvalue="missing")
    return next(((number, path, now) for number, (path, now) in enumerate(names, 1) if path != now), None)


EMPTY: Final = xxhash.xxh3_64_hexdigest(b"")

PLAIN_FIELDS: Final = ("offset", "line", "blank", "head", "tail", "open_end")
TEXT_FIELDS: Final = ("offset", "line", "blank", "digest", "open_end")
"""The fields of a position in entries of a plain file, and of a text that is only read from its start."""


class FilePosition(NamedTuple):
    """A position between two lines of a file; for a compressed file, of its text.

    Attributes:
        offset, line, blank: number of bytes, lines, and blank lines, which are no rows, before the position.
        open_end: the last line had no newline (yet).
        seen: for a plain file in a followed directory, its known size in bytes; else 0.
        head, tail: for a plain file, XXH3 (64 bits, hexadecimal) of the first and last 4 KiB before the position.
        digest: for a compressed file, XXH3 of all text before the position; empty if nothing was read.
    """

    offset: int = 0
    line: int = 0
    blank: int = 0
    open_end: bool = False
    seen: int = 0
    head: str = ""
    tail: str = ""
    digest: str = ""

    @property
    def place(self) -> FilePosition:
        """The position alone, without digests and `seen`."""
        return FilePosition(self.offset, self.line, self.blank, self.open_end)

    def encode(self, names: Sequence[str]) -> dict[str, Any]:
        """Returns these fields for an entry."""
        return {name: getattr(self, name) for name in names}

    @classmethod
    def decode(cls, entry: dict[str, Any] | None, name: str, names: Sequence[str], *kinds: str) -> FilePosition:
        """Reads the entry that `encode` returned; None is the start. Raises SourceRefused."""
        if entry is None:
            return cls()
        types = {known: type(cls._field_defaults[known]) for known in names}
        return cls(**dict(zip(names, read_entry(entry, name, *kinds, **types), strict=True)))

    @classmethod
    def of(cls, values: dict[str, Any]) -> FilePosition:
        """Returns the position with these fields; missing ones are 0, empty or false. Raises ValueError."""
        known = {name: values[name] for name in cls._fields if name in values}
        for name, value in known.items():
            if not _is_field(value, type(cls._field_defaults[name])):
                raise ValueError(f"{name} = {value!r}")
        return cls(**known)


def read_entry(entry: dict[str, Any], name: str, *kinds: str, **fields: type) -> tuple[Any, ...]:
    """Returns fields of a source's entry, given by name and type.

    Raises SourceRefused if the entry has another name or kind, or a field is missing or invalid.
    """
    if entry.get("kind") not in kinds:
        expected = f"a source of kind {' or '.join(map(repr, kinds))}"
        raise refuse_position(name, expected, repr(entry.get("kind"))[:120])
    if entry.get("path") != name:
        raise refuse_position(name, f"path {name!r}", repr(entry.get("path"))[:120])
    for key, kind in fields.items():
        if not _is_field(entry.get(key), kind):
            raise refuse_position(name, f"{key} of type {kind.__name__}", repr(entry.get(key))[:120])
    return tuple(entry[key] for key in fields)


def _is_field(value: Any, kind: type) -> bool:
    return type(value) is kind and (type(value) is not int or value >= 0)


def plain_name(path: str) -> str:
    """Returns a path in a form for JSON: with backslash escapes for bytes that are not UTF-8, without credentials."""
    return redact(path).encode("utf-8", "backslashreplace").decode()


def refuse_position(name: str, expected: str, actual: str) -> SourceRefused:
    """Returns the error for a source that cannot continue from its position in the last seal."""
    what = "the stream's last seal holds no position to continue from"
    text = f"{name}: {what}: expected {expected}, found {actual}; choose another --out, or another --writer"
    return SourceRefused(text, file=name, expected=expected, actual=actual)
