"""Streams as data sets for training. The only place of lazyshard that imports torch.

- `dataset`: the data set; `index_space`: what its indices mean; `rank`: whose they are
- `reading_marks`: what the producer is told of that
- `samples`: from a row to a sample, by `encode`, `cache` and `bad_samples`
- `shared`: what a data set's processes tell each other
"""

from lazyshard.data.dataset import LazyShardedDataset
from lazyshard.data.rank import resolve_rank
from lazyshard.data.shared import Stats

__all__ = ["LazyShardedDataset", "Stats", "resolve_rank"]
