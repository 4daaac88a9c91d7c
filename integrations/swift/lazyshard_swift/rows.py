"""From a row of the stream to what the trainer takes: ms-swift's own preprocessing, then its template, row by row.

On the ordinary path ms-swift first maps the whole data set (columns renamed, `query`/`response`, Alpaca and ShareGPT
rows turned into `messages`) and encodes afterwards. The same classes are applied here to one row at a time.
"""

from __future__ import annotations

from typing import Any

from lazyshard.errors import SkipSample
from lazyshard_swift import packed


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
        return packed.encode(row, self._packing_length, lambda one: self._encode(one, return_length))

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
