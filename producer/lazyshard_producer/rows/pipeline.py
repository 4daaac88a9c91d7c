"""From settings and a position to a feed: sources, mixing, recipe, shuffling and refusals put together."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from lazyshard.storage.patience import Patience
from lazyshard_producer.configuration.settings import Settings
from lazyshard_producer.errors import SettingInvalid
from lazyshard_producer.opening import open_source, source_kind, source_size
from lazyshard_producer.position import RunPosition, decode_position, plain_name, resume, source_names
from lazyshard_producer.rows.book import Book
from lazyshard_producer.rows.feed import Feed, PlainFeed
from lazyshard_producer.rows.making import RecipeFeed
from lazyshard_producer.rows.mixing import Mixer
from lazyshard_producer.rows.recipe import Maker, Recipe
from lazyshard_producer.rows.refusals import Quarantine, Refusals
from lazyshard_producer.rows.unit import BegunUnit
from lazyshard_producer.rows.workers import Workers
from lazyshard_producer.sources.source import Context, Source


class Pipeline:
    """What gives the rows of a run.

    Args:
        settings: what to do.
        committed: the source position of the last seal; None for a stream without chunks.
        warn: is told what is odd.
        check_owner: raises `ProducerFenced` where another producer has taken the stream over.
        patience: is told what is asked of sources and functions.
        refusals: takes refused rows; None for what the settings say.

    Raises:
        SourceRefused: a source cannot be read, or is not what it was.
        SettingInvalid: a function cannot be had, or rows are made in another way than before.
        StreamMismatch: the position is not one of ours.
    """

    def __init__(
        self,
        settings: Settings,
        committed: Any,
        *,
        warn: Callable[[str], None],
        check_owner: Callable[[], object] = lambda: None,
        patience: Patience | None = None,
        refusals: Refusals | None = None,
    ) -> None:
        patience = patience or Patience()
        self._settings = settings
        self._context = Context(Path(settings.out), settings.max_row_bytes)
        paths = [source.path for source in settings.sources]
        nothing = RunPosition(sources=())
        start, names = nothing, []
        if committed is not None:
            start, names = decode_position(committed, settings.out), source_names(committed)
        start = resume(start, names, paths)
        recipe = Recipe(
            columns=settings.columns,
            where=settings.where,
            transform=settings.transform,
            encoding=settings.encoding,
            max_row_bytes=settings.max_row_bytes,
        )
        weights = [source.weight for source in settings.sources if source.weight is not None] or None
        described = describe(settings)
        if committed is not None:
            start = _same_recipe(start, described, warn)
        maker = Maker(recipe) if recipe or settings.shuffle else None
        refusals = refusals or _make_refusals(settings, start, check_owner)
        self._workers = Workers(recipe, settings.workers) if settings.workers and maker is not None else None
        try:
            mixer = Mixer(
                self._open,
                paths,
                weights,
                start,
                weights_before=start.recipe.get("weights"),
                block=settings.shuffle,
                sizes=[source_size(source) for source in settings.sources],
                ahead=maker is not None,
                patience=patience,
                most=None if settings.rate is None else max(1, int(settings.rate)),
                empty=lambda name: warn(f"{name}: holds no rows"),
            )
        except BaseException:
            refusals.close()
            self._close_workers()
            raise
        self.names: Final = mixer.names
        self.book: Final = Book(mixer, refusals, start, described, warn)
        self.feed: Final[Feed] = (
            PlainFeed(self.book)
            if maker is None
            else RecipeFeed(
                self.book,
                maker,
                self._workers,
                begun=_begun_unit(start, settings),
                block=settings.shuffle,
                seed=settings.seed,
                warn=warn,
                patience=patience,
            )
        )

    def here(self) -> RunPosition:
        """Returns the position after all that the feed gave."""
        return self.feed.here()

    def close(self) -> None:
        """Closes sources, workers and the quarantine. May be called twice."""
        self.book.mixer.close()
        self.book.refusals.close()
        self._close_workers()

    def _open(self, index: int, entry: dict[str, Any] | None) -> Source:
        return open_source(self._settings.sources[index], entry, self._context)

    def _close_workers(self) -> None:
        if self._workers is not None:
            self._workers.close()
            self._workers = None


def _make_refusals(settings: Settings, start: RunPosition, check_owner: Callable[[], object]) -> Refusals:
    quarantine = None
    if settings.on_bad_row == "quarantine":
        quarantine = Quarantine(Path(settings.out), start.quarantine_bytes, check_owner=check_owner)
    return Refusals(
        settings.on_bad_row,
        settings.max_bad_rows,
        quarantine,
        start.refused,
        quarantine_bytes=start.quarantine_bytes,
    )


def _begun_unit(start: RunPosition, settings: Settings) -> BegunUnit | None:
    """Returns the unit in which a position is, if it is in one."""
    if not start.skip:
        return None
    sources = [source for source, rows in zip(settings.sources, start.unit, strict=True) if rows]
    return BegunUnit(
        names=[plain_name(source.path) for source in sources],
        rows=sum(start.unit),
        skip=start.skip,
        digest=start.skipped,
        new=all(source.resume == "append" and source_kind(source) == "stdin" for source in sources),
    )


def describe(settings: Settings) -> dict[str, Any]:
    """Returns the settings by which rows are chosen, made and ordered, as positions keep them: those that are set."""
    weights = [source.weight for source in settings.sources if source.weight is not None]
    found = {
        "columns": [list(pair) for pair in settings.columns],
        "where": settings.where,
        "transform": settings.transform,
        "shuffle": settings.shuffle,
        "seed": settings.seed if settings.shuffle else None,
        "weights": weights,
    }
    return {name: value for name, value in found.items() if value}


def _same_recipe(start: RunPosition, described: dict[str, Any], warn: Callable[[str], None]) -> RunPosition:
    """Returns the start, after a look whether rows are made as they were before."""
    before = start.recipe
    changed = [name for name in {**before, **described} if before.get(name) != described.get(name)]
    if not changed:
        return start
    names = ", ".join(f"{name} (was {before.get(name)!r}, now {described.get(name)!r})" for name in changed)
    if start.skip and set(changed) != {"weights"}:
        raise SettingInvalid(
            f"rows are to be made in another way than those of which the last chunk holds a part: {names}; go on with "
            f"the settings of before, or choose another --out",
            option=f"--{changed[0]}",
        )
    warn(f"from here on rows are made or ordered in another way than before: {names}")
    if "weights" in changed and not start.skip:
        values = {name: getattr(start, name) for name in RunPosition.__dataclass_fields__}
        return RunPosition(**values | {"drawn": (0,) * len(start.drawn)})
    return start
