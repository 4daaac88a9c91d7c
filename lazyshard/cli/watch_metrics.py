"""What a look at a stream says to Prometheus. The names are described in `docs/watch.md`.

Of what is not known there is no sample. Where the last look has failed or has no answer, there is none at all but
those that say so: what was true a while ago must not keep an alarm from ringing. Consumers beyond `MAX_LABELS`, those
that lag least, have none of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final, get_args

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from lazyshard.cli.output import one_line
from lazyshard.cli.status import status_values
from lazyshard.cli.watch_server import LastLook
from lazyshard.inspection.outlook import Outlook, State

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
MAX_LABELS: Final = 100  # Values of a label: as many as people look at, and far below what burdens a server

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
        silent = 0.0 if facts.silent_since is None else max(0.0, self._clock() - facts.silent_since)
        yield from _gauge("stream_up", "Whether the last look at the stream has succeeded", facts.current is not None)
        yield from _gauge("stream_last_look_seconds", "Time of the last answer, since 1970", facts.answered_at)
        yield from _gauge("stream_silent_seconds", "How long the look under way has had no answer", silent)
        if facts.current is not None:
            yield from _of_status(status_values(facts.current))


def metrics_page(facts: Callable[[], LastLook[Outlook]], clock: Callable[[], float]) -> Callable[[], bytes]:
    """Returns a function that returns what Prometheus reads; `clock` returns seconds since 1970."""
    # A registry of its own: what others in this process register does not belong here.
    registry = CollectorRegistry()
    registry.register(_StreamCollector(facts, clock))
    return lambda: generate_latest(registry)


def _of_status(status: dict[str, Any]) -> Iterator[GaugeMetricFamily]:
    for name, field, text in _STREAM:
        yield from _gauge(f"stream_{name}", text, status[field])
    yield from _gauge("stream_problems", "What is wrong with its files", len(status["problems"]))
    yield from _gauge("stream_consumers", "Consumers that have registered", len(status["consumers"]))
    producer = status["producer"]
    if producer is not None:
        yield from _gauge("stream_heartbeat_age_seconds", "Since a sign of the producer", producer["heartbeat_age_s"])
        states = [((state,), state == producer["state"]) for state in get_args(State)]
        yield from _family("stream_producer_state", "What the producer does", ["state"], states)
    sources = [((one["name"],), one) for one in status["mixture"]]
    yield from _shares("stream_source", "the rows to come", "the rows drawn so far", ["source"], sources)
    shown = sorted(status["consumers"], key=lambda one: (-(one["lag_chunks"] or 0), one["name"]))[:MAX_LABELS]
    waits = [((one["name"],), one["supply"] == "dry") for one in shown]
    wrong = [((one["name"],), one["problem"] is not None) for one in shown]
    for name, field, text in _CONSUMER:
        yield from _family(f"consumer_{name}", text, ["consumer"], [((one["name"],), one[field]) for one in shown])
    yield from _family("consumer_waiting", "Whether it waits for chunks", ["consumer"], waits)
    yield from _family("consumer_problem", "Whether its cursor does not count", ["consumer"], wrong)
    blends = [((one["name"], stream["stream"]), stream) for one in shown for stream in one["blend"]]
    words = "its samples to come", "its samples trained so far"
    yield from _shares("consumer_blend", *words, ["consumer", "stream"], blends)


def _shares(
    name: str, coming: str, so_far: str, labels: Sequence[str], shares: Sequence[tuple[Sequence[str], dict[str, Any]]]
) -> Iterator[GaugeMetricFamily]:
    for field, text in (("weight", coming), ("share", so_far)):
        values = [(names, share[field]) for names, share in shares]
        yield from _family(f"{name}_{field}", f"Share of {text}", labels, values)


def _family(
    name: str, text: str, labels: Sequence[str], values: Iterable[tuple[Sequence[str], float | None]]
) -> Iterator[GaugeMetricFamily]:
    """Yields a metric with a sample for each value that is known; nothing where there is none."""
    # Two sources may be shown alike once what cannot be shown is escaped.
    known = {(*names[:-1], one_line(names[-1])): float(value) for names, value in values if value is not None}
    if known:
        family = GaugeMetricFamily(f"lazyshard_{name}", text, labels=labels)
        for shown, value in known.items():
            family.add_metric(shown, value)
        yield family


def _gauge(name: str, text: str, value: float | None) -> Iterator[GaugeMetricFamily]:
    return _family(name, text, [], [] if value is None else [([""], value)])
