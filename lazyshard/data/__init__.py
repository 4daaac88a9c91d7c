"""Streams as data sets for training. The only place of lazyshard that imports torch.

- `dataset`: the data set; `iterable`: the same as an iterable
- `index_space`, one an epoch (`epoch_spaces`): what its indices mean, by `order` and `rank`
- `run_states`: where a run stands; `state_checks`: whether the stream still holds what it needs to go on
- `reading_marks`, `commits`: what the producer is told of that
- `lane_reader`: reads the rows of indices
- `samples`: from a row to a sample, by `encode`, `cache` and `bad_samples`
- `shared`: what a data set's processes tell each other
"""

from lazyshard.data.dataset import LazyShardedDataset
from lazyshard.data.iterable import LazyShardedIterable
from lazyshard.data.rank import resolve_rank
from lazyshard.data.shared import Stats

__all__ = ["LazyShardedDataset", "LazyShardedIterable", "Stats", "resolve_rank"]
