"""How a consumer blends a stream with others: what each has given so far, and its weight; kept in cursors, for people.

No decision depends on it: a run goes on from the state of its blend, which is in its checkpoints.
"""

from __future__ import annotations

import reprlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from lazyshard.errors import redact
from lazyshard.format.blend_state import BlendState
from lazyshard.format.fields import MAX_SAMPLES, Fields, printable

__all__ = ["MAX_SHARES", "BlendShare", "blend_shares", "given_shares", "read_shares", "share_values"]

MAX_SHARES: Final = 64
"""Of a blend of more streams nothing is kept: each of their cursors would tell of all of them."""

_MAX_CHARACTERS: Final = 400


@dataclass(frozen=True, slots=True)
class BlendShare:
    """One stream of a blend.

    Attributes:
        stream: its directory or URL, as the run was given it but without credentials; the end of a long one.
        weight: share of the samples that come next, of the closed range [0, 1].
        consumed: samples of it that were trained, over all ranks.
    """

    stream: str
    weight: float
    consumed: int


def blend_shares(state: BlendState, directories: Mapping[str, object]) -> tuple[BlendShare, ...]:
    """Returns how streams are blended at the end of a state, in the order of the blend; none if these are too many.

    Args:
        state: of the run.
        directories: of the streams, by the names by which the state calls them.
    """
    last = state.parts[-1]
    if len(last.members) > MAX_SHARES:
        return ()
    _, parts, _ = [piece for piece in last.pieces if piece[0] <= last.draws][-1]
    whole = sum(parts)
    return tuple(
        BlendShare(
            printable(redact(str(directories.get(state.names[member], state.names[member]))))[-_MAX_CHARACTERS:],
            part / whole,
            state.members[member].consumed,
        )
        for member, part in zip(last.members, parts, strict=True)
    )


def share_values(found: Iterable[BlendShare]) -> list[dict[str, Any]]:
    """Returns shares as they stand in a file."""
    return [asdict(one) for one in found]


def read_shares(fields: Fields, field: str) -> tuple[BlendShare, ...]:
    """Returns the shares that stand in a file; none where there is no such field.

    Raises:
        FormatInvalid: they are none.
    """
    found = fields.values.get(field)
    if found is None:
        return ()
    if not isinstance(found, list) or not 0 < len(found) <= MAX_SHARES:
        raise fields.refuse(field, f"1 to {MAX_SHARES} streams with their shares", reprlib.repr(found))
    return tuple(_share(fields, f"{field}[{number}]", one) for number, one in enumerate(found))


def _share(fields: Fields, where: str, value: Any) -> BlendShare:
    if not isinstance(value, dict):
        raise fields.refuse(where, "an object", reprlib.repr(value))
    stream, weight, consumed = (value.get(name) for name in ("stream", "weight", "consumed"))
    if not isinstance(stream, str) or not 0 < len(stream) <= _MAX_CHARACTERS:
        raise fields.refuse(f"{where}.stream", f"1 to {_MAX_CHARACTERS} characters", reprlib.repr(stream))
    if isinstance(weight, bool) or not isinstance(weight, (int, float)) or not 0 <= weight <= 1:
        raise fields.refuse(f"{where}.weight", "a number from 0 to 1", reprlib.repr(weight))
    if type(consumed) is not int or not 0 <= consumed <= MAX_SAMPLES:
        raise fields.refuse(f"{where}.consumed", f"an integer from 0 to {MAX_SAMPLES}", reprlib.repr(consumed))
    return BlendShare(stream, float(weight), consumed)


def given_shares(found: Sequence[BlendShare]) -> list[float | None]:
    """Returns what each stream has given of all samples that were trained; None where none was."""
    whole = sum(one.consumed for one in found)
    return [one.consumed / whole if whole else None for one in found]
