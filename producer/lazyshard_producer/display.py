"""What is seen of a run: a bar on a terminal, else lines for a log, and metrics for Prometheus.

A stderr that is gone (a closed pipe, a full disk) is no reason to stop.
"""

from __future__ import annotations

import contextlib
import math
import sys
import threading
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from itertools import accumulate
from typing import Any, Final, Literal, get_args

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Column

from lazyshard_producer.errors import NAME, ExtraMissing, SettingInvalid, count, holding, one_line


@dataclass(frozen=True, slots=True, kw_only=True)
class Tally:
    """How far a run is, by default one that has not begun. Earlier runs are included, but in new and seconds."""

    samples: int = 0  # rows in the stream, those of the open chunk included
    published: int = 0  # rows of sealed chunks
    chunks: int = 0
    new: int = 0  # rows that this run has read
    seconds: float = 0.0
    bytes: int = 0  # that were read
    bytes_total: int | None = None  # of the sources when the run started; None where nobody can know, as of live ones
    blank_lines: int = 0  # that were skipped
    duplicate_key_rows: int = 0  # rows that name a key twice
    refused_rows: int = 0  # rows left out or quarantined
    sources: int = 1

    @property
    def rate(self) -> float:
        """Rows a second of this whole run; 0 until time has passed."""
        return self.new / self.seconds if self.seconds > 0 else 0.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run came out: finished, the stream has ended now; interrupted or terminated by a signal, and resumable."""

    end: Literal["finished", "interrupted", "terminated"]
    out: str
    tally: Tally

    def __str__(self) -> str:
        """Returns what is published, and after a signal how to continue."""
        tally = self.tally
        if self.end == "finished":
            return f"finished: {self.out} holds {holding(tally.samples, tally.chunks)}"
        waste = tally.samples - tally.published
        again = f" ({count(waste, 'row')} of the unfinished chunk will be read again)" if waste else ""
        published = holding(tally.published, tally.chunks)
        return f"{self.end}: {published} published in {self.out}; run the same command again to continue{again}"


def summary(outcome: Outcome) -> str:
    """Returns the last line of a run for people."""
    tally = outcome.tally
    speed = f"{tally.new:,} read in {tally.seconds:.1f} s ({tally.rate:,.0f} samples/s)"
    duplicate = f"{count(tally.duplicate_key_rows, 'row')} with duplicate keys"
    refused = f", {count(tally.refused_rows, 'row')} refused" if tally.refused_rows else ""
    return f"{outcome}; {speed}; {count(tally.blank_lines, 'blank line')} skipped, {duplicate}{refused}"


def log_line(event: str, **values: str | int | float) -> str:
    """Returns a line for a log: time=2026-01-02T03:04:05Z event=end out="a dir" samples=3 seconds=1.2."""
    line = f"time={datetime.now(timezone.utc):%Y-%m-%dT%H:%M:%SZ} event={event}"
    for key, value in values.items():
        text = f"{value:.1f}" if isinstance(value, float) else str(value)
        if not text or set(text) & set(' "=\\'):
            text = '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'
        line += f" {key}={text}"
    return one_line(line)


def _values(tally: Tally, rate: float | None = None) -> dict[str, Any]:
    """Returns what a log line says of how far a run is, by default with the rate of the whole run."""
    values = asdict(tally) | {"new": tally.rate if rate is None else rate, "sources": None}
    return {"rate" if name == "new" else name: value for name, value in values.items() if value is not None}


BAR_EVERY_S: Final = 0.2  # how often the bar's figures change; faster than anybody reads


class Display:
    """A line of key=value at the start, every `every_s` seconds, at the end, and where a wait begins and is over.

    Without `every_s` only warnings and the last line, which is for a `log` or for people. On a terminal, `screen`, a
    bar shows the share of the sources' bytes that is read. Nothing raises OSError.
    """

    clock: Callable[[], float] = time.monotonic

    def __init__(self, log: bool, every_s: float | None = None, screen: Console | None = None) -> None:
        self.metrics = Metrics()
        self._log, self._screen, self._quiet = log, screen, every_s is None
        self._looks: deque[Tally] = deque(maxlen=2)
        self.every_s = 60.0 if every_s is None else every_s
        # Of the present wait, if any: why, since when, and whether that was told; and when one was told last.
        self._reason: str | None = None
        self._began, self._told, self._told_at = 0.0, False, -math.inf
        if screen is not None:
            # The looks of 10 s: the rate neither jumps nor lags.
            self.every_s, self._looks = BAR_EVERY_S, deque(maxlen=51)
            column = Column(no_wrap=True, overflow="ellipsis")
            figures = TextColumn("{task.fields[figures]}", markup=False, table_column=column)
            columns = (BarColumn(bar_width=20), TaskProgressColumn(), figures, TimeRemainingColumn())
            self._bar = Progress(*columns, console=screen, transient=True, auto_refresh=False)
            self._task = self._bar.add_task("", total=None, figures="")

    def start(self, out: str, tally: Tally) -> None:
        """Says that the run starts."""
        self._looks.append(tally)
        self._event("start", out=out, **_values(tally), sources=tally.sources)
        if self._screen is not None:
            with contextlib.suppress(OSError):
                self._bar.start()
            self.show(tally)

    def show(self, tally: Tally) -> None:
        """Says how far it is; the rate is that since the last time, or over the last seconds."""
        self._looks.append(tally)
        first = self._looks[0]
        rate = (tally.new - first.new) / (tally.seconds - first.seconds) if tally.seconds > first.seconds else 0.0
        waiting = self._reason if self._is_lasting() else None
        if self._screen is None:
            return self._event("progress", **_values(tally, rate), **({"waiting": waiting} if waiting else {}))
        text = f"{count(tally.samples, 'sample')}  {rate:,.0f}/s  {count(tally.chunks, 'chunk')}"
        text += f"  {tally.refused_rows:,} refused" if tally.refused_rows else ""
        text += f"  waiting: {waiting}" if waiting else ""
        total = None if tally.bytes_total is None else max(1, tally.bytes, tally.bytes_total)
        with contextlib.suppress(OSError):
            self._bar.update(self._task, total=total, completed=tally.bytes, figures=text, refresh=True)

    def wait(self, reason: str | None) -> None:
        """Is told, as often as one likes, that the run waits and for what, which may change; None: it continues."""
        now = self.clock()
        if reason is None:
            if self._told:
                self._event("resumed", waited_seconds=now - self._began)
            self._told, self._reason = False, None
            return
        self._began, self._reason = now if self._reason is None else self._began, reason
        if not self._told and self._is_lasting() and now - self._told_at >= self.every_s:
            self._told, self._told_at = True, now
            self._event("waiting", reason=reason)

    def note(self, text: str) -> None:
        """Says what may be of interest."""
        if self._screen is None:
            self._event("note", message=text)
        else:
            say(f"{NAME}: {text}", self._screen)

    def warn(self, text: str) -> None:
        """Says what is odd."""
        say(f"{NAME}: warning: {text}", self._screen)

    def log_every(self, seconds: float) -> None:
        """Takes another time between two lines of a log; means nothing to a bar."""
        if self._screen is None:
            self.every_s = seconds

    def finish(self, outcome: Outcome) -> None:
        """Says how it came out, in the last line: for a log with key=value, for people a sentence."""
        more = {} if outcome.end == "finished" else {"message": str(outcome)}
        line = log_line("end", result=outcome.end, out=outcome.out, **_values(outcome.tally), **more)
        say(line if self._log else summary(outcome))

    def close(self) -> None:
        """Takes away what moves on the screen; may be called twice."""
        if self._screen is not None:
            with contextlib.suppress(OSError):
                self._bar.stop()

    def _event(self, event: str, **values: Any) -> None:
        if not self._quiet:
            say(log_line(event, **values))

    def _is_lasting(self) -> bool:
        """Whether a wait is worth a line by now; the heartbeat in head.json says `waiting` then too."""
        return self.clock() - self._began >= 5.0


def choose_display(quiet: bool, log_every_s: float, metrics: Metrics) -> Display:
    """Returns the display that suits stderr: warnings and the last line only where `quiet`, else a bar or a log."""
    console = Console(stderr=True)
    screen, every_s = (console, None) if console.is_terminal else (None, log_every_s)
    display = Display(screen is None, None if quiet else every_s, None if quiet else screen)
    display.metrics = metrics
    return display


def say(line: str, screen: Console | None = None) -> None:
    """Prints a line on stderr, if it still goes anywhere; above the bar that is on a screen."""
    with contextlib.suppress(OSError, ValueError):
        if screen is not None:
            screen.print(one_line(line), markup=False, highlight=False, soft_wrap=True)
        elif sys.stderr is not None:  # None where it was closed before the start; print() would take stdout instead
            print(one_line(line), file=sys.stderr, flush=True)


Reason = Literal["source", "rate", "limit", "deadlock"]
"""What a run can wait for: rows, the time of --rate, room below a limit, and room that will never come."""

STATES: Final = ("running", "waiting", "idle", "finished", "failed")  # those of head.json
_SEAL_BUCKETS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
"""Upper bounds in seconds: from a chunk of a few rows on a fast disk to a large one on a slow share."""

_FIGURES: Final[tuple[tuple[str, str, str, str, dict[str, float]], ...]] = (
    ("samples", "Counter", "Rows published by this process", "", {"": 0}),
    ("bytes", "Counter", "Bytes of the chunks published by this process", "", {"": 0}),
    ("chunks", "Counter", "Chunks published by this process", "", {"": 0}),
    ("stream_chunks", "Gauge", "Chunks of the stream", "", {"": 0}),
    ("last_publish_seconds", "Gauge", "Time of the last publish, since 1970", "", {"": 0}),
    ("source_rows", "Counter", "Rows taken", "source", {}),
    ("refused_rows", "Counter", "Rows refused", "kind", {"skipped": 0, "quarantined": 0}),
    # Nobody knows yet; 0 would be a claim.
    ("ahead_chunks", "Gauge", "Chunks published beyond the slowest reader's hint", "", {"": math.nan}),
    ("consumer_lag_chunks", "Gauge", "Chunks published beyond durable checkpoints", "consumer", {}),
    ("disk_bytes", "Gauge", "Bytes that the stream takes", "", {"": math.nan}),
    ("waiting", "Gauge", "Whether it waits for this", "reason", dict.fromkeys(get_args(Reason), 0)),
    ("wait_seconds", "Counter", "How long it has waited for this", "reason", dict.fromkeys(get_args(Reason), 0.0)),
    ("state", "Gauge", "State of the producer", "state", dict.fromkeys(STATES, 0)),
)
"""Each figure with its kind, what it says, the name of its label, and its values at the start."""

MAX_LABELS: Final = 100  # values of a label: as many as people look at, and far below what burdens a server
OTHERS: Final = "(others)"


class Metrics:
    """The figures of a run, which Prometheus gets over HTTP at `address`, where there is a port; 0 takes a free one.

    Of sources and consumers the first `MAX_LABELS` have their own label, the rest share one. Raises ExtraMissing
    without prometheus-client, and SettingInvalid where the port cannot be had; nothing afterwards.
    """

    clock: Callable[[], float] = time.monotonic

    def __init__(self, host: str = "", port: int | None = None) -> None:
        self.address: str | None = None
        self._values = {name: dict(values) for name, *_, values in _FIGURES}
        self._seals, self._seal_s = [0] * (len(_SEAL_BUCKETS) + 1), 0.0
        self._reason: Reason | None = None
        self._since = 0.0
        # Else who asks between two steps would get a sum that falls later, which counters must not.
        self._lock = threading.RLock()
        if port is None:
            return
        try:
            from prometheus_client import CollectorRegistry, start_http_server
        except ModuleNotFoundError:
            text = "--metrics-port needs prometheus-client, which is not installed: pip install 'lazyshard[producer]'"
            raise ExtraMissing(text, package="prometheus-client", extra="producer") from None
        # A registry of its own: what others in this process register does not belong here.
        registry = CollectorRegistry()
        registry.register(self)
        try:
            self._server, self._thread = start_http_server(port, host, registry)
        except (OSError, OverflowError) as cause:
            reason = (getattr(cause, "strerror", None) or str(cause)).lower()
            text = f"--metrics-port: {host}:{port} cannot be listened at ({reason}); choose another one, or 0 for any"
            raise SettingInvalid(f"{text} that is free", option="--metrics-port") from None
        self.address = f"http://{host}:{self._server.server_port}/metrics"

    def published(self, chunks: int, samples: int, size: int, seconds: float) -> None:
        """A chunk of so many rows and bytes is published; `seconds` from its last row to its seal being durable."""
        for name, more in (("samples", samples), ("bytes", size), ("chunks", 1)):
            self._values[name][""] += more
        self._values |= {"stream_chunks": {"": chunks}, "last_publish_seconds": {"": time.time()}}
        self._seals[bisect_left(_SEAL_BUCKETS, seconds)] += 1
        self._seal_s += seconds
        self._tell_one("state", "running")

    def taken(self, source: str, rows: int) -> None:
        """So many more rows were taken from a source."""
        sources = self._values["source_rows"]
        name = source if source in sources or len(sources) < MAX_LABELS else OTHERS
        sources[name] = sources.get(name, 0) + rows

    def refused(self, kind: Literal["skipped", "quarantined"], rows: int = 1) -> None:
        """So many more rows were refused."""
        self._values["refused_rows"][kind] += rows

    def waits(self, reason: Reason | None) -> None:
        """Waits for this from now on, or has not to wait any longer. Call it as often as you like."""
        with self._lock:
            self._values["wait_seconds"], self._since, self._reason = self.waited(), self.clock(), reason
        self._tell_one("waiting", reason)
        self._tell_one("state", "running" if reason is None else "waiting")

    def consumers(self, lags: Mapping[str, int], ahead: int | None) -> None:
        """Chunks published beyond each consumer's checkpoints, and beyond the slowest reader's hint if there is any."""
        shown: dict[str, float] = dict(sorted(lags.items())[:MAX_LABELS])
        if len(lags) > MAX_LABELS:
            shown[OTHERS] = max(lag for name, lag in lags.items() if name not in shown)
        self._values["consumer_lag_chunks"] = shown
        self._values["ahead_chunks"] = {"": math.nan if ahead is None else ahead}

    def disk(self, size: int) -> None:
        """The stream takes so many bytes."""
        self._values["disk_bytes"] = {"": size}

    def close(self) -> None:
        """Stops serving. May be called twice."""
        if self.address is not None:
            self._server.shutdown()
            self._thread.join()
            self._server.server_close()

    def _tell_one(self, name: str, label: str | None) -> None:
        self._values[name] = {other: other == label for other in self._values[name]}

    def waited(self) -> dict[str, float]:
        """Returns how many seconds each reason was waited for until now; never less than before."""
        with self._lock:
            waited = dict(self._values["wait_seconds"])
            if self._reason is not None:
                waited[self._reason] += max(0.0, self.clock() - self._since)
            return waited

    def collect(self) -> Iterator[Any]:
        """Yields all figures as Prometheus' client has them; is called from its thread."""
        from prometheus_client import core

        for name, kind, text, label, _ in _FIGURES:
            labels = [label] if label else []
            family = getattr(core, f"{kind}MetricFamily")(f"lazyshard_producer_{name}", text, labels=labels)
            # A copy: the run continues meanwhile.
            for key, value in (self.waited() if name == "wait_seconds" else dict(self._values[name])).items():
                family.add_metric([key] if label else [], value)
            yield family
        text = "From a chunk's last row to its seal being durable"
        seals = core.HistogramMetricFamily("lazyshard_producer_seal_seconds", text, labels=[])
        bounds = [*map(str, _SEAL_BUCKETS), "+Inf"]
        seals.add_metric([], list(zip(bounds, accumulate(self._seals), strict=True)), self._seal_s)
        yield seals
