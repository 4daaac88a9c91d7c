"""What a look at a stream says to Prometheus. The names are described in `docs/watch.md`.

Of what is not known there is no sample. Where the last look has failed or has no answer, there is none at all but
those that say so: what was true a while ago must not keep an alarm from ringing. Consumers beyond `MAX_LABELS`, those
that lag least, have none of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final, get_args

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from lazyshard.cli.output import one_line
from lazyshard.cli.status import status_values
from lazyshard.cli.watch_server import LastLook
from lazyshard.inspection.outlook import Outlook, State

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"

MAX_LABELS: Final = 100
"""Values of a label: as many as people look at, and far below what burdens a server."""

_STATES: Final[tuple[str, ...]] = get_args(State)

_STREAM: Final = (
    ("published_chunks", "published_chunks", "Chunks published, the deleted ones included"),
    ("published_samples", "published_samples", "Rows in them"),
    ("retired_chunks", "retired_chunks", "Chunks that are deleted or being deleted"),
    ("ended", "ended", "Whether nothing will follow"),
    ("published_samples_per_second", "published_samples_per_s", "How fast rows come"),
    ("used_bytes", "used_bytes", "What the stream takes on disk"),
    ("free_bytes", "free_bytes", "What its filesystem has left"),
    ("growth_bytes_per_second", "growth_bytes_per_s", "Growth of the stream, deletion taken off"),
    ("full_in_seconds", "full_in_s", "When the disk is full at that rate"),
    ("quarantined_rows", "quarantined_rows", "Rows refused so far"),
)
_CONSUMER: Final = (
    ("consumed_samples", "consumed_samples", "Samples in its durable checkpoints"),
    ("checkpoint_age_seconds", "checkpoint_age_s", "Since its last checkpoint"),
    ("lag_chunks", "lag_chunks", "Published chunks that it is not done with"),
    ("lag_samples", "lag_samples", "Published samples that are not in its checkpoints"),
    ("lag_seconds", "lag_s", "How long ago the first chunk was published that it is not done with"),
    ("ahead_chunks", "ahead_chunks", "Published chunks beyond those that it needs; negative where it waits"),
    ("read_samples_per_second", "read_samples_per_s", "How fast it goes"),
    ("starving_in_seconds", "starving_in_s", "When it has to wait at these rates, 0 where it does"),
)
"""Metric, field of `lazyshard status --json`, help."""


class _StreamCollector(Collector):
    def __init__(self, facts: Callable[[], LastLook[Outlook]], clock: Callable[[], float]) -> None:
        self._facts = facts
        self._clock = clock

    def describe(self) -> list[GaugeMetricFamily]:
        """Tells the registry nothing: it would look at the stream for it."""
        return []

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Yields the figures, as the registry wants them."""
        facts = self._facts()
        yield _gauge("stream_up", "Whether the last look at the stream has succeeded", facts.current is not None)
        if facts.answered_at is not None:
            yield _gauge("stream_last_look_seconds", "Time of the last answer, since 1970", facts.answered_at)
        silent = 0.0 if facts.silent_since is None else max(0.0, self._clock() - facts.silent_since)
        yield _gauge("stream_silent_seconds", "How long the look that is under way has had no answer", silent)
        if facts.current is not None:
            yield from _of_status(status_values(facts.current))


def metrics_page(facts: Callable[[], LastLook[Outlook]], clock: Callable[[], float]) -> Callable[[], bytes]:
    """Returns a function that returns what Prometheus reads.

    Args:
        facts: returns what is known of the stream.
        clock: returns seconds since 1970.
    """
    # A registry of its own: what others in this process register does not belong here.
    registry = CollectorRegistry()
    registry.register(_StreamCollector(facts, clock))
    return lambda: generate_latest(registry)


def _of_status(status: dict[str, Any]) -> Iterator[GaugeMetricFamily]:
    for name, field, text in _STREAM:
        if status[field] is not None:
            yield _gauge(f"stream_{name}", text, status[field])
    yield _gauge("stream_problems", "What is wrong with its files", len(status["problems"]))
    yield _gauge("stream_consumers", "Consumers that have registered", len(status["consumers"]))
    producer = status["producer"]
    if producer is not None:
        yield _gauge("stream_heartbeat_age_seconds", "Since a sign of the producer", producer["heartbeat_age_s"])
        state = GaugeMetricFamily("lazyshard_stream_producer_state", "What the producer does", labels=["state"])
        for other in _STATES:
            state.add_metric([other], other == producer["state"])
        yield state
    yield from _of_mixture(status["mixture"])
    shown = sorted(status["consumers"], key=lambda one: (-(one["lag_chunks"] or 0), one["name"]))[:MAX_LABELS]
    yield from _of_consumers(shown)
    yield from _of_blends(shown)


def _of_mixture(mixture: list[dict[str, Any]]) -> Iterator[GaugeMetricFamily]:
    for field, text in (("weight", "Share of the rows to come"), ("share", "Share of the rows drawn so far")):
        family = GaugeMetricFamily(f"lazyshard_stream_source_{field}", text, labels=["source"])
        # Two sources may be shown alike once what cannot be shown is escaped.
        values = {one_line(one["name"]): one[field] for one in mixture if one[field] is not None}
        for name, value in values.items():
            family.add_metric([name], value)
        if values:
            yield family


def _of_blends(consumers: list[dict[str, Any]]) -> Iterator[GaugeMetricFamily]:
    for field, text in (("weight", "Share of its samples to come"), ("share", "Share of its samples trained so far")):
        family = GaugeMetricFamily(f"lazyshard_consumer_blend_{field}", text, labels=["consumer", "stream"])
        values = {
            (one["name"], one_line(stream["stream"])): stream[field]
            for one in consumers
            for stream in one["blend"]
            if stream[field] is not None
        }
        for names, value in values.items():
            family.add_metric(names, value)
        if values:
            yield family


def _of_consumers(consumers: list[dict[str, Any]]) -> Iterator[GaugeMetricFamily]:
    def family(name: str, text: str, values: dict[str, float | None]) -> Iterator[GaugeMetricFamily]:
        made = GaugeMetricFamily(f"lazyshard_consumer_{name}", text, labels=["consumer"])
        known = {consumer: value for consumer, value in values.items() if value is not None}
        for consumer, value in known.items():
            made.add_metric([consumer], value)
        if known:
            yield made

    for name, field, text in _CONSUMER:
        yield from family(name, text, {one["name"]: one[field] for one in consumers})
    waiting = {one["name"]: float(one["supply"] == "dry") for one in consumers}
    yield from family("waiting", "Whether it waits for chunks", dict(waiting))
    wrong = {one["name"]: float(one["problem"] is not None) for one in consumers}
    yield from family("problem", "Whether its cursor does not count", dict(wrong))


def _gauge(name: str, text: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"lazyshard_{name}", text, value=float(value))
