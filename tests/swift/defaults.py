"""Our arguments of ms-swift and what they are if nobody gives them, in the order in which help shows them."""

from __future__ import annotations

from typing import Any, Final

DEFAULTS: Final[dict[str, Any]] = {
    "sharded_lazy": False,
    "sharded_lazy_samples_per_chunk": None,
    "sharded_lazy_max_wait": 600.0,
    "sharded_lazy_shuffle_window": None,
    "sharded_lazy_shuffle_distance": None,
    "sharded_lazy_unit": None,
    "sharded_lazy_consumer": None,
    "sharded_lazy_on_bad_sample": None,
    "sharded_lazy_on_end": "stop",
    "sharded_lazy_skip": None,
    "sharded_lazy_encode_cache": None,
    "sharded_lazy_encode_cache_size": None,
    "sharded_lazy_take_over": False,
}
