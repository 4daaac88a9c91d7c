"""What the seals of `lazyshard-producer` say of the source rows of which a stream was made.

Its positions, in the field `source` of a seal, count the rows that were read, and keep the settings by which rows were
made of them. Nobody needs it to read the stream: it tells `lazyshard inspect` what to show.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lazyshard.format.fields import MAX_SAMPLES

__all__ = ["Made", "SourceRows", "form_made"]


@dataclass(frozen=True, slots=True)
class SourceRows:
    """The source rows up to a chunk's end.

    Attributes:
        read: rows read, refused ones included.
        refused: those among them that were left out as bad rows.
        exact: whether the chunk ends where a source row does, or a buffer of them; otherwise a few more were read, of
            which a part is published.
        pack: most tokens of a pack; None where rows are not packed.
    """

    read: int
    refused: int
    exact: bool
    pack: int | None = None

    @classmethod
    def read_source(cls, source: Any) -> SourceRows | None:
        """Returns what the field `source` of a seal says; None where it says nothing of it, or nothing that can be."""
        if not isinstance(source, dict) or not isinstance(source.get("sources"), list):
            return None
        read, refused, skip = (source.get(name, -1) for name in ("rows", "refused", "skip"))
        if not all(map(_is_count, (read, refused, skip))) or refused > read:
            return None
        recipe = source.get("recipe")
        pack = recipe.get("pack") if isinstance(recipe, dict) else None
        return cls(read, refused, not skip, pack if _is_count(pack) and pack else None)


@dataclass(frozen=True, slots=True)
class Made:
    """How rows were made.

    Attributes:
        form: "pack", "split" or "pad"; None for rows as they are.
        size: most tokens of a pack or sequence; None where rows are as they are, or nothing tells it.
        shuffled: whether the producer has shuffled the rows.
    """

    form: str | None = None
    size: int | None = None
    shuffled: bool = False

    @classmethod
    def read_source(cls, source: Any) -> Made:
        """Returns what the field `source` of a seal says.

        >>> Made.read_source({"recipe": {"pad": {"size": 512}, "shuffle": 1000}})
        Made(form='pad', size=512, shuffled=True)
        """
        form = form_made(source)
        recipe = source.get("recipe") if isinstance(source, dict) else None
        if not isinstance(recipe, dict):
            return cls()
        told = recipe[form] if form is not None else None
        size = told.get("size") if isinstance(told, dict) else told
        return cls(form, size if type(size) is int and 0 < size < 2**32 else None, bool(recipe.get("shuffle")))


def form_made(source: Any) -> str | None:
    """Returns into what rows were made, as the field `source` of their chunk's seal says; None for rows as they are.

    Returns:
        "pack", "split" or "pad", as the option of `lazyshard-producer run`.
    """
    recipe = source.get("recipe") if isinstance(source, dict) else None
    if not isinstance(recipe, dict):
        return None
    return next((form for form in ("pack", "split", "pad") if recipe.get(form)), None)


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value <= MAX_SAMPLES
