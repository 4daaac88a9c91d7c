"""The figures that Prometheus finds, as its client registers them. `metrics` says what each of them means."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final, Literal, get_args

from lazyshard_producer.display.wait_clock import WaitClock

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry
    from prometheus_client.core import CounterMetricFamily

Reason = Literal["source", "rate", "limit", "deadlock"]
"""What a run can wait for: rows, the time of --rate, room below a limit, and room that will never come."""

STATES: Final = ("running", "waiting", "idle", "finished", "failed")
"""Those of head.json."""

_SEAL_BUCKETS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
"""Upper bounds in seconds: from a chunk of a few rows on a fast disk to a large one on a slow share."""


class Figures:
    """Registers them.

    Args:
        registry: where.
        waits: how long was waited.
    """

    def __init__(self, registry: CollectorRegistry, waits: WaitClock) -> None:
        from prometheus_client import Counter, Gauge, Histogram

        def named(kind: Any, name: str, text: str, labels: tuple[str, ...] = (), **more: Any) -> Any:
            return kind(f"lazyshard_producer_{name}", text, labels, registry=registry, **more)

        self.samples = named(Counter, "samples", "Rows published by this process")
        self.bytes = named(Counter, "bytes", "Bytes of the chunks published by this process")
        self.chunks = named(Counter, "chunks", "Chunks published by this process")
        self.stream_chunks = named(Gauge, "stream_chunks", "Chunks of the stream")
        self.seal = named(
            Histogram,
            "seal_seconds",
            "From a chunk's last row to its seal being durable",
            buckets=_SEAL_BUCKETS,
        )
        self.last_publish = named(Gauge, "last_publish_seconds", "Time of the last publish, since 1970")
        self.source_rows = named(Counter, "source_rows", "Rows taken", ("source",))
        self.refused = named(Counter, "refused_rows", "Rows refused", ("kind",))
        self.ahead = named(Gauge, "ahead_chunks", "Chunks published beyond the slowest reader's mark")
        self.lag = named(Gauge, "consumer_lag_chunks", "Chunks published beyond durable checkpoints", ("consumer",))
        self.disk = named(Gauge, "disk_bytes", "Bytes that the stream takes")
        self.waiting = named(Gauge, "waiting", "Whether it waits for this", ("reason",))
        self.state = named(Gauge, "state", "State of the producer", ("state",))
        for reason in get_args(Reason):
            self.waiting.labels(reason)
        for kind in ("skipped", "quarantined"):
            self.refused.labels(kind)
        for state in STATES:
            self.state.labels(state)
        registry.register(_Waited(waits))
        # Nobody knows yet; 0 would be a claim.
        self.ahead.set(math.nan)
        self.disk.set(math.nan)


class _Waited:
    """A counter that is worked out when it is asked for."""

    def __init__(self, waits: WaitClock) -> None:
        self._waits = waits

    def collect(self) -> Iterator[CounterMetricFamily]:
        """Yields it, as the registry wants it."""
        from prometheus_client.core import CounterMetricFamily

        family = CounterMetricFamily(
            "lazyshard_producer_wait_seconds", "How long it has waited for this", labels=["reason"]
        )
        for reason, seconds in self._waits.seconds().items():
            family.add_metric([reason], seconds)
        yield family
