"""From a row of the stream to what the trainer takes: ms-swift's own preprocessing, then its template, row by row.

On the ordinary path ms-swift first maps the whole data set (columns renamed, `query`/`response`, Alpaca and ShareGPT
rows turned into `messages`) and encodes afterwards. The same classes are applied here to one row at a time.

With ``--packing true`` the rows of the stream are packs already, as `lazyshard-producer run --pack` publishes them.
Where ms-swift packs by itself, a sample of its `PackingDataset` is the list of the encoded rows of a pack, and its
template's collator takes such lists apart, puts all rows of the micro batch one behind the other, and gives each
positions from 0, from which the borders between them (`cu_seqlens`) follow. The same lists are made here of rows that
are packs. (ms-swift 4.6: `swift/dataset/packing.py`; `data_collator` and `packing_row` in `swift/template/base.py`.)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lazyshard import LazyShardError, StreamReader
from lazyshard.errors import ChunkRetired, SkipSample
from lazyshard.format.batch import decode_pack
from lazyshard.format.row import parse_row
from lazyshard.memory import raise_if_short
from lazyshard_swift.errors import SettingsRefused

_PRODUCE = "make them where the stream is produced, with `lazyshard-producer run --pack TOKENS`"


class RowEncoder:
    """Turns rows into encoded samples; an `encode_fn` for `LazyShardedDataset`.

    Args:
        template: ms-swift's template, in its training mode.
        columns: the mapping of ``--columns``, None for none.
        auto_columns: whether well-known column names are mapped, as ms-swift does unless
            ``--disable_auto_column_mapping true``.
        keep_unused: whether columns that ms-swift does not know go on to the template (``--remove_unused_columns
            false``).
        packing_length: most tokens of a pack, where rows are packs, which become lists of encoded rows; None where
            they are not.

    Rows longer than ``--max_length``, which ms-swift drops from an ordinary data set, raise `SkipSample`.
    """

    def __init__(
        self,
        template: Any,
        columns: dict[str, str] | None = None,
        auto_columns: bool = True,
        keep_unused: bool = False,
        packing_length: int | None = None,
    ) -> None:
        self._template = template
        self._keep_unused = keep_unused
        self._packing_length = packing_length
        self._columns = dict(columns or {})
        self._auto_columns = auto_columns
        # Preprocessor and column names by the columns of a row: rows of a stream mostly have the same.
        self._known: dict[tuple[str, ...], tuple[Any, dict[str, str]]] = {}

    def __getstate__(self) -> dict[str, Any]:
        """Leaves the preprocessors behind."""
        return self.__dict__ | {"_known": {}}

    def __call__(self, row: dict[str, Any], return_length: bool = True) -> Any:
        """Returns the encoded row, with its length; of a pack the list of its rows, encoded.

        Raises:
            SkipSample: the row is too long, or ms-swift's preprocessing drops it.
            Exception: whatever ms-swift raises.
        """
        return encode_packs(row, self._packing_length, lambda one: self._encode(one, return_length))

    def _encode(self, row: dict[str, Any], return_length: bool) -> Any:
        from swift.template import MaxLengthError

        try:
            return self._template.encode(self.standardise(row), return_length=return_length)
        except MaxLengthError as cause:
            raise SkipSample(str(cause)) from cause

    def standardise(self, row: dict[str, Any]) -> dict[str, Any]:
        """Returns the row as ms-swift's preprocessing leaves it."""
        names = tuple(row)
        known = self._known.get(names)
        if known is None:
            known = self._known[names] = self._choose(names)
        preprocessor, renamed = known
        given, row = row, {renamed.get(name, name): value for name, value in row.items()}
        if "solution" in given:
            # ms-swift keeps it under this name past the preprocessing that takes it for the response.
            row["__#solution"] = given["solution"]
        batch = preprocessor.batched_preprocess(
            {name: [value] for name, value in row.items()}, strict=True, ignore_max_length_error=False
        )
        counts = {len(values) for values in batch.values()}
        if counts == {0} or not batch:
            raise SkipSample("ms-swift's preprocessing drops this row")
        if counts != {1}:
            raise ValueError(f"ms-swift's preprocessing makes {max(counts)} samples of this row; a row is one sample")
        kept = batch if self._keep_unused else preprocessor.standard_keys
        return {name: values[0] for name, values in batch.items() if name in kept}

    def _choose(self, names: tuple[str, ...]) -> tuple[Any, dict[str, str]]:
        """Returns ms-swift's preprocessor for rows with these columns, and how their columns are renamed for it."""
        from swift.dataset import AutoPreprocessor, RowPreprocessor

        def rename(columns: _Columns, mapping: dict[str, str]) -> _Columns:
            renamed: _Columns = RowPreprocessor.safe_rename_columns(columns, mapping)
            return renamed

        columns = rename(_Columns({name: name for name in names}), self._columns)
        preprocessor = AutoPreprocessor()._get_preprocessor(columns)
        columns = rename(columns, preprocessor.origin_columns)
        if self._auto_columns:
            columns = rename(columns, preprocessor.columns)
        return preprocessor, {was: now for now, was in columns.features.items() if now != was}


class _Columns:
    """The columns of a row, with as much of the face of a Hugging Face data set as ms-swift needs to rename them.

    Attributes:
        features: present name to name in the row.
    """

    def __init__(self, features: dict[str, str]) -> None:
        self.features = features

    def rename_columns(self, mapping: dict[str, str]) -> _Columns:
        return _Columns({mapping.get(now, now): was for now, was in self.features.items()})


def prepare_packing(args: Any, template: Any) -> None:
    """Has ms-swift's template take lists of encoded rows, as `PackingDataset` does, if ``--packing`` is given."""
    if getattr(args, "packing", False):
        template.packing = True
        template.padding_free = True


def packing_length(args: Any) -> int | None:
    """Returns the most tokens of a pack, None where samples are not packed."""
    if not getattr(args, "packing", False):
        return None
    length: int | None = getattr(args, "packing_length", None) or args.max_length
    if length is None:
        raise _packing_refused("--packing true needs to know the most tokens of a pack: give --packing_length N")
    return length


def check_packs(args: Any, reader: StreamReader, samples: int) -> None:
    """Refuses a stream of packs without ``--packing``, and one of other rows with it, as far as there are rows yet.

    Args:
        args: ms-swift's arguments.
        reader: of the stream.
        samples: published, as all ranks know.

    Raises:
        SettingsRefused: with the way out.
    """
    if not samples:
        return
    try:
        row = _any_row(reader, samples)
    except LazyShardError:
        # Whoever reads on there will say so.
        return
    wrong = _mismatch(decode_pack(row) is not None, bool(getattr(args, "packing", False)))
    if wrong is not None:
        raise _packing_refused(f"--dataset {reader.directory}: {wrong}")


def encode_packs(row: dict[str, Any], most: int | None, encode_row: Callable[[dict[str, Any]], Any]) -> Any:
    """Returns what the collator takes for a row: it encoded, or for a pack the list of its rows encoded.

    Args:
        row: of the stream.
        most: tokens of a pack, None where there are to be no packs.
        encode_row: ms-swift's template, for one row.

    Raises:
        SkipSample: a row of the pack is too long, or ms-swift drops it: the pack is left out.
        ValueError: it is a pack and was to be none, or the other way round; a row of it cannot be encoded; or it has
            more tokens than a pack may have.
    """
    pack = decode_pack(row)
    wrong = _mismatch(pack is not None, most is not None)
    if wrong is not None:
        raise ValueError(wrong)
    if pack is None or most is None:
        return encode_row(row)
    samples = []
    for number, inner in enumerate(pack.rows):
        try:
            samples.append(encode_row(inner))
        except SkipSample as cause:
            raise SkipSample(f"row {number} of its pack: {cause}") from cause
        except Exception as cause:
            raise_if_short(cause)
            raise ValueError(f"row {number} of its pack: {type(cause).__name__}: {cause}") from cause
    lengths = [sum(sample["lengths"]) for sample in samples]
    if sum(lengths) > most:
        raise ValueError(
            f"its pack has {sum(lengths)} tokens, more than the {most} of --packing_length: its rows have {lengths} as "
            f"encoded here, and {pack.lengths} as they were packed. Measure them with the template that is trained"
        )
    return samples


def _any_row(reader: StreamReader, samples: int) -> dict[str, Any]:
    """Returns a row that is there."""
    try:
        return parse_row(reader.line(0))
    except ChunkRetired:
        return parse_row(reader.line(samples - 1))


def _mismatch(is_pack: bool, packing: bool) -> str | None:
    """Returns what is wrong where packs and ``--packing`` do not go together."""
    if is_pack and not packing:
        return "its rows are packs (lazyshard-producer run --pack): give --packing true"
    if packing and not is_pack:
        return (
            "its rows are no packs, and a stream cannot be sorted into packs before training as a whole data set is: "
            f"{_PRODUCE}, or leave out --packing; with --padding_free true the samples of a micro batch are "
            "concatenated without padding"
        )
    return None


def _packing_refused(message: str) -> SettingsRefused:
    return SettingsRefused(message, argument="packing")
