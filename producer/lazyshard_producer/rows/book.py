"""Places between two rows with what was counted up to there, and the positions made of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from lazyshard_producer.position import RunPosition
from lazyshard_producer.rows.mixing import Mixer
from lazyshard_producer.rows.refusals import Refusals
from lazyshard_producer.rows.standing import Standing
from lazyshard_producer.sources.source import Place


class Spot(NamedTuple):
    """A place between two source rows with what was counted up to there."""

    standing: Standing
    counts: dict[str, int]


class Book:
    """Knows how to make a position of a place: the mixer's part and what is counted on the way.

    Args:
        mixer: where the rows come from.
        refusals: takes refused rows.
        start: where the run starts; its counts go on from there.
        recipe: the settings by which rows are made, as positions keep them; in a unit that was begun before, those of
            then are kept.
        warn: is told what is odd.

    Attributes:
        rows: rows read so far, refused ones included.
        duplicate: rows among them that name a key twice.
        blocks: blocks that were shuffled or packed.
    """

    def __init__(
        self,
        mixer: Mixer,
        refusals: Refusals,
        start: RunPosition,
        recipe: dict[str, Any],
        warn: Callable[[str], None],
    ) -> None:
        self.mixer = mixer
        self.refusals = refusals
        self.rows = start.rows
        self.duplicate = start.duplicate
        self.blocks = start.blocks
        self._recipe = recipe
        self._recipe_before = start.recipe
        self._warn = warn
        self._warned: set[str] = set()

    def count_duplicate(self, place: Place) -> None:
        """Counts a row that names a key twice; says so of the first of each source."""
        self.duplicate += 1
        if place.file not in self._warned:
            self._warned.add(place.file)
            self._warn(
                f"{place.file}:{place.line}: a key is named twice in one object (readers keep one of the values); "
                f"further such rows of this source are only counted"
            )

    def spot(self, standing: Standing) -> Spot:
        """Returns the place, with the counts of this moment."""
        counts = {
            "rows": self.rows,
            "duplicate": self.duplicate,
            "blocks": self.blocks,
            "refused": self.refusals.count,
            "quarantine_bytes": self.refusals.quarantine_bytes,
        }
        return Spot(standing, counts)

    def position(self, spot: Spot, **unit: Any) -> RunPosition:
        """Returns the position of a place; `unit` are the fields of `RunPosition` for one that is begun there."""
        self.refusals.sync()
        recipe = self._recipe_before if spot.standing.again else self._recipe
        return self.mixer.position(spot.standing, recipe=recipe, **unit, **spot.counts)
