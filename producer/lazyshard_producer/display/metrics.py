"""What a run says to Prometheus: counters and gauges over HTTP, where --metrics-port is given.

There is no label whose values grow with the data: of sources and consumers the first `MAX_LABELS` have their own, the
rest share one. Nothing is authenticated or encrypted; the address is the loopback one unless asked otherwise.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final, Literal, get_args

from lazyshard_producer.errors import ExtraMissing, SettingInvalid

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry
    from prometheus_client.core import CounterMetricFamily

Reason = Literal["source", "rate", "limit", "deadlock"]
"""What a run can wait for: rows, the time of --rate, room below a limit, and room that will never come."""

STATES: Final = ("running", "waiting", "idle", "finished", "failed")  # Those of head.json
_SEAL_BUCKETS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
"""Upper bounds in seconds: from a chunk of a few rows on a fast disk to a large one on a slow share."""

MAX_LABELS: Final = 100  # Values of a label: as many as people look at, and far below what burdens a server
OTHERS: Final = "(others)"


class Metrics:
    """Takes the figures of a run, and neither raises nor blocks; served at `address` from a thread of its own.

    At port 0 that is any that is free; None serves nothing, and needs no package. Raises ExtraMissing without
    prometheus-client, and SettingInvalid where the port cannot be had.
    """

    def __init__(
        self,
        host: str = "",
        port: int | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], float] = time.time,
    ) -> None:
        self.address: str | None = None
        self._figures: _Figures | None = None
        if port is None:
            return
        try:
            from prometheus_client import CollectorRegistry, disable_created_metrics, start_http_server
        except ModuleNotFoundError:
            raise ExtraMissing(
                "--metrics-port needs prometheus-client, which is not installed: pip install 'lazyshard[producer]'",
                package="prometheus-client",
                extra="producer",
            ) from None
        # Else there is a second series for each counter, which says when this process began.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        # A registry of its own: what others in this process register does not belong here.
        registry = CollectorRegistry()
        self._waits = WaitClock(get_args(Reason), clock)
        self._figures = _Figures(registry, self._waits)
        self._now = now
        self._reason: Reason | None = None
        self._sources: set[str] = set()
        self._consumers: set[str] = set()
        try:
            self._server, self._thread = start_http_server(port, host, registry)
        except (OSError, OverflowError) as cause:
            reason = getattr(cause, "strerror", None) or str(cause)
            raise SettingInvalid(
                f"--metrics-port: {host}:{port} cannot be listened at ({reason.lower()}); choose another one, or 0 for "
                f"any that is free",
                option="--metrics-port",
            ) from None
        self.address = f"http://{host}:{self._server.server_port}/metrics"

    def published(self, chunks: int, samples: int, size: int, seconds: float) -> None:
        """A chunk of so many rows and bytes is published; `seconds` from its last row to its seal being durable."""
        if (told := self._figures) is not None:
            told.samples.inc(samples)
            told.bytes.inc(size)
            told.chunks.inc()
            told.stream_chunks.set(chunks)
            told.seal.observe(seconds)
            told.last_publish.set(self._now())

    def taken(self, source: str, rows: int) -> None:
        """So many more rows were taken from a source."""
        if self._figures is not None:
            if source not in self._sources and len(self._sources) >= MAX_LABELS:
                source = OTHERS
            else:
                self._sources.add(source)
            self._figures.source_rows.labels(source).inc(rows)

    def refused(self, kind: Literal["skipped", "quarantined"], rows: int = 1) -> None:
        """So many more rows were refused."""
        if self._figures is not None:
            self._figures.refused.labels(kind).inc(rows)

    def waits(self, reason: Reason | None) -> None:
        """Waits for this from now on, or has not to wait any longer. Call it as often as you like."""
        if self._figures is not None and reason != self._reason:
            self._reason = reason
            self._waits.wait(reason)
            for other in get_args(Reason):
                self._figures.waiting.labels(other).set(other == reason)

    def consumers(self, lags: Mapping[str, int], ahead: int | None) -> None:
        """How many chunks are published beyond each consumer's checkpoints, and beyond the slowest reader's mark.

        Consumers that are missing have gone; `ahead` is None where there is no reader.
        """
        if self._figures is None:
            return
        gauge = self._figures.lag
        shown = dict(sorted(lags.items())[:MAX_LABELS])
        if len(lags) > MAX_LABELS:
            shown[OTHERS] = max(lag for name, lag in lags.items() if name not in shown)
        for gone in self._consumers - shown.keys():
            gauge.remove(gone)
        for name, lag in shown.items():
            gauge.labels(name).set(lag)
        self._consumers = set(shown)
        self._figures.ahead.set(math.nan if ahead is None else ahead)

    def disk(self, size: int) -> None:
        """The stream takes so many bytes."""
        if self._figures is not None:
            self._figures.disk.set(size)

    def state(self, state: str) -> None:
        """The state of head.json is this one."""
        if self._figures is not None:
            for other in STATES:
                self._figures.state.labels(other).set(other == state)

    def close(self) -> None:
        """Stops serving. May be called twice."""
        if self._figures is not None:
            if self._thread.is_alive():
                self._server.shutdown()
                self._thread.join()
            self._server.server_close()


class WaitClock:
    """Adds up waits, by what can be waited for."""

    def __init__(self, reasons: Iterable[str], clock: Callable[[], float]) -> None:
        self._clock = clock
        self._waited = dict.fromkeys(reasons, 0.0)
        self._reason: str | None = None
        self._since = 0.0
        # Else who asks between two steps would get a sum that falls later, which counters must not.
        self._lock = threading.Lock()

    def wait(self, reason: str | None) -> None:
        """Notes that this is waited for from now on; None: nothing is. Again with the same reason the wait goes on."""
        with self._lock:
            self._add()
            self._reason = reason

    def seconds(self) -> dict[str, float]:
        """Returns how many seconds each reason was waited for until now; never less than before."""
        with self._lock:
            self._add()
            return dict(self._waited)

    def collect(self) -> Iterator[CounterMetricFamily]:
        """Yields the sums as a counter, as the registry wants it, worked out when it is asked for."""
        from prometheus_client.core import CounterMetricFamily

        text = "How long it has waited for this"
        family = CounterMetricFamily("lazyshard_producer_wait_seconds", text, labels=["reason"])
        for reason, seconds in self.seconds().items():
            family.add_metric([reason], seconds)
        yield family

    def _add(self) -> None:
        now = self._clock()
        if self._reason is not None:
            self._waited[self._reason] += max(0.0, now - self._since)
        self._since = now


class _Figures:
    """The figures, as Prometheus' client has them, registered."""

    def __init__(self, registry: CollectorRegistry, waits: WaitClock) -> None:
        from prometheus_client import Counter, Gauge, Histogram

        def named(kind: Any, name: str, text: str, labels: tuple[str, ...] = (), **more: Any) -> Any:
            return kind(f"lazyshard_producer_{name}", text, labels, registry=registry, **more)

        self.samples = named(Counter, "samples", "Rows published by this process")
        self.bytes = named(Counter, "bytes", "Bytes of the chunks published by this process")
        self.chunks = named(Counter, "chunks", "Chunks published by this process")
        self.stream_chunks = named(Gauge, "stream_chunks", "Chunks of the stream")
        durable = "From a chunk's last row to its seal being durable"
        self.seal = named(Histogram, "seal_seconds", durable, buckets=_SEAL_BUCKETS)
        self.last_publish = named(Gauge, "last_publish_seconds", "Time of the last publish, since 1970")
        self.source_rows = named(Counter, "source_rows", "Rows taken", ("source",))
        self.refused = named(Counter, "refused_rows", "Rows refused", ("kind",))
        self.ahead = named(Gauge, "ahead_chunks", "Chunks published beyond the slowest reader's mark")
        self.lag = named(Gauge, "consumer_lag_chunks", "Chunks published beyond durable checkpoints", ("consumer",))
        self.disk = named(Gauge, "disk_bytes", "Bytes that the stream takes")
        self.waiting = named(Gauge, "waiting", "Whether it waits for this", ("reason",))
        self.state = named(Gauge, "state", "State of the producer", ("state",))
        kinds = {self.waiting: get_args(Reason), self.refused: ("skipped", "quarantined"), self.state: STATES}
        for figure, values in kinds.items():
            for value in values:
                figure.labels(value)
        registry.register(waits)
        # Nobody knows yet; 0 would be a claim.
        self.ahead.set(math.nan)
        self.disk.set(math.nan)
