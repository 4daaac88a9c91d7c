"""Positions: how far a run has come, as values. They travel in the seals: a publish moves them.

The `source` of a seal is `RunPosition.encode`: its version, the entry of every source that was given, in order, those
not yet begun included, and the fields of `RunPosition`, `lead` and `cut` only where they are not 0. What is in an entry
is the affair of its kind. Unknown fields are ignored, a later version is refused.
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
"""Key of a compressed file's size in its entry: with it a later run sees without reading that nothing was appended."""

Count: TypeAlias = Annotated[int, Field(ge=0)]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPosition:
    """A place between two published rows.

    The sources are read on from `sources`, and of what is made of their rows from there the first `skip` are left out:
    they are published. A source row or block, a part of which is published, is a unit: it is made of as many rows of
    each source as `unit` says, even where one has grown, and comes out the same, as the digest `skipped` tells. Of a
    unit that is dealt by cost the first `lead` rows, as they were made, belong to the unit before. Where rows are cut
    into sequences, just the first `cut` tokens of the last row that is skipped are published, its BOS included.

    Attributes:
        sources: the position in each source, an object that its kind has made, None where it is not begun.
        skip: rows made from there on that are published.
        lead: those of them that belong to the unit before; at most `skip`.
        cut: tokens that are published of the last of them; 0 for all of it.
        rows, refused, duplicate: rows read up to `sources`; those refused, and those that name a key twice.
        blocks: blocks of rows that were shuffled or packed up to there.
        quarantine_bytes: size of `quarantine.jsonl` up to there.
        drawn: where sources are mixed, rows drawn from each since one of them was finished the last time; else empty.
        finished: where sources are mixed, whether the end of each was met; else empty.
        unit: rows of each source that the unit is made of; empty where `skip` is 0.
        skipped: XXH3 (64 bits, hexadecimal) of the rows that are skipped; empty where `skip` is 0.
        recipe: the settings by which rows are made of rows, by name.
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
        """Returns the JSON value that a seal keeps; `names` are those of all sources, for those not begun.

        Only at the `end` of all sources it tells how large a compressed file is: when that is found depends on how far
        ahead is read, and the same rows make the same seals.
        """
        given = [entry or {"kind": None, "path": name} for entry, name in zip(self.sources, names, strict=True)]
        entries = [{key: one[key] for key in one if end or key != PACKED_SIZE} for one in given]
        values = {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()}
        values = {name: value for name, value in values.items() if value or name not in ("lead", "cut")}
        return {"version": VERSION, **values, "sources": entries}


_READER: Final = TypeAdapter(RunPosition)


def decode_position(value: Any, directory: str) -> RunPosition:
    """Reads what `RunPosition.encode` returned. Raises StreamMismatch."""
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
        # As JSON, of which a list is a tuple also where types are strict.
        position = _READER.validate_json(orjson.dumps({**value, "sources": entries}), strict=True)
    except ValidationError as cause:
        first = cause.errors()[0]
        raise _mismatch(directory, "source positions", f"{first['msg']} - at {first['loc']}") from None
    skip, unit = position.skip, position.unit
    if not {len(position.drawn), len(position.finished), len(unit)} <= {0, len(sources)}:
        raise _mismatch(directory, f"counts for each of {len(sources)} sources", repr(value)[:120])
    made = bool(position.skipped and any(unit))
    if made != (skip > 0) or position.lead > skip or (position.cut and not skip):
        raise _mismatch(directory, "of rows that are skipped what they are made of, and a digest", f"skip {skip}")
    return position


def _mismatch(directory: str, expected: str, actual: str) -> StreamMismatch:
    text = str(refuse_position(directory, expected, actual))
    return StreamMismatch(text, directory=directory, expected=expected, actual=actual)


def source_names(value: Any) -> list[str]:
    """Returns the paths of the sources in what `RunPosition.encode` returned, after `decode_position` took it."""
    return [entry["path"] for entry in value["sources"]]


def resume(position: RunPosition, committed: Sequence[str], given: Sequence[str]) -> RunPosition:
    """Returns the position to start from, with every source that was appended to the list at its start."""
    if (difference := compare_sources(committed, given)) is not None:
        number, expected, actual = difference
        text = f"source {number} was {expected}, now it is {actual}; give the sources of the first start in the same"
        advice = "order (more may follow them), or another --out"
        raise SourceRefused(f"{text} {advice}", file=actual, expected=expected, actual=actual)
    more = len(given) - len(committed)
    mixed = more if position.drawn else 0
    return replace(
        position,
        sources=(*position.sources, *[None] * more),
        unit=(*position.unit, *[0] * (more if position.unit else 0)),
        drawn=(*position.drawn, *[0] * mixed),
        finished=(*position.finished, *[False] * mixed),
    )


def compare_sources(committed: Sequence[str], given: Sequence[str]) -> tuple[int, str, str] | None:
    """Returns (number from 1, path expected, path given or "missing") of the first difference, or None."""
    names = zip_longest(committed, map(plain_name, given[: len(committed)]), fillvalue="missing")
    return next(((number, path, now) for number, (path, now) in enumerate(names, 1) if path != now), None)


EMPTY: Final = xxhash.xxh3_64_hexdigest(b"")

PLAIN_FIELDS: Final = ("offset", "line", "blank", "head", "tail", "open_end")
TEXT_FIELDS: Final = ("offset", "line", "blank", "digest", "open_end")
"""What the entries of a plain file keep of its position, and those of a text that is only read from its start."""


class FilePosition(NamedTuple):
    """A place between two lines of a file, of a compressed one in its text.

    Attributes:
        offset, line, blank: bytes and lines before it, and blank ones among these, which are no rows.
        open_end: the last of them had no newline (yet).
        seen: bytes that were there of a plain file that is followed; else 0.
        head, tail: of a plain file: XXH3 (64 bits, hexadecimal) of the first and the last bytes before it, 4 KiB each.
        digest: of a compressed file: XXH3 of all the text before it; empty where nothing was read.
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
        """The place alone, without what the file is known by."""
        return FilePosition(self.offset, self.line, self.blank, self.open_end)

    def encode(self, names: Sequence[str]) -> dict[str, Any]:
        """Returns these fields as an entry has them."""
        return {name: getattr(self, name) for name in names}

    @classmethod
    def decode(cls, entry: dict[str, Any] | None, name: str, names: Sequence[str], *kinds: str) -> FilePosition:
        """Reads what `encode` returned, None as the start. Raises SourceRefused."""
        if entry is None:
            return cls()
        types = {known: type(cls._field_defaults[known]) for known in names}
        return cls(**dict(zip(names, read_entry(entry, name, *kinds, **types), strict=True)))

    @classmethod
    def of(cls, values: dict[str, Any]) -> FilePosition:
        """Returns the position of such fields, 0, empty or false where they are not there. Raises ValueError."""
        known = {name: values[name] for name in cls._fields if name in values}
        for name, value in known.items():
            if not _is_field(value, type(cls._field_defaults[name])):
                raise ValueError(f"{name} = {value!r}")
        return cls(**known)


def read_entry(entry: dict[str, Any], name: str, *kinds: str, **fields: type) -> tuple[Any, ...]:
    """Returns fields, by their types, of the entry of the source of this name and of one of these kinds.

    Raises SourceRefused: it is another one's, or a field is missing or wrong.
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
    """Returns a path as JSON can hold it: bytes that are no UTF-8 as backslash escapes, a URL without credentials."""
    return redact(path).encode("utf-8", "backslashreplace").decode()


def refuse_position(name: str, expected: str, actual: str) -> SourceRefused:
    """Returns the error for a source whose position in the last seal cannot be resumed from."""
    what = "the stream's last seal holds no position to continue from"
    text = f"{name}: {what}: expected {expected}, found {actual}; choose another --out"
    return SourceRefused(text, file=name, expected=expected, actual=actual)
