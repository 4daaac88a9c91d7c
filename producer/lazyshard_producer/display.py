"""The output of a run: a progress bar on a terminal, otherwise log lines, and metrics for Prometheus.

A broken stderr (a closed pipe, a full disk) does not stop the run.
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

from lazyshard_producer.errors import NAME, SettingInvalid, count, holding, load_extra, one_line


@dataclass(frozen=True, slots=True, kw_only=True)
class Tally:
    """The progress of a run, by default at its start. Includes earlier runs, except for `new` and `seconds`."""

    samples: int = 0  # rows in the stream, including the open chunk
    published: int = 0  # rows of sealed chunks
    chunks: int = 0
    new: int = 0  # rows that this run has read
    seconds: float = 0.0
    bytes: int = 0  # bytes read
    bytes_total: int | None = None  # of the sources when the run started; None if unknown, as for live sources
    blank_lines: int = 0  # blank lines skipped
    duplicate_key_rows: int = 0  # rows that contain a key twice
    refused_rows: int = 0  # rows skipped or quarantined
    sources: int = 1

    @property
    def rate(self) -> float:
        """Rows per second of this whole run; 0 until time has passed."""
        return self.new / self.seconds if self.seconds > 0 else 0.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a run: finished if the stream has ended; interrupted or terminated by a signal, and resumable."""

    end: Literal["finished", "interrupted", "terminated"]
    out: str
    tally: Tally

    def __str__(self) -> str:
        """Returns the published amount, and after a signal how to continue."""
        tally = self.tally
        if self.end == "finished":
            return f"finished: {self.out} holds {holding(tally.samples, tally.chunks)}"
        waste = tally.samples - tally.published
        again = f" ({count(waste, 'row')} of the unfinished chunk will be read again)" if waste else ""
        published = holding(tally.published, tally.chunks)
        return f"{self.end}: {published} published in {self.out}; run the same command again to continue{again}"


def summary(outcome: Outcome) -> str:
    """Returns the last line of a run, for users."""
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
    """Returns the values of a progress line, by default with the rate of the whole run."""
    values = asdict(tally) | {"new": tally.rate if rate is None else rate, "sources": None}
    return {"rate" if name == "new" else name: value for name, value in values.items() if value is not None}


BAR_EVERY_S: Final = 0.2  # how often the bar's figures change


class Display:
    """Writes key=value lines: at the start, every `every_s` seconds, at the end, and when a wait begins and ends.

    Without `every_s`, writes only warnings and the last line, in the form of a `log` or for users. On a terminal,
    `screen`, a bar shows the share of the sources' bytes that is read. Never raises OSError.
    """

    clock: Callable[[], float] = time.monotonic

    def __init__(self, log: bool, every_s: float | None = None, screen: Console | None = None) -> None:
        self.metrics = Metrics()
        self._log, self._screen, self._quiet = log, screen, every_s is None
        self._looks: deque[Tally] = deque(maxlen=2)
        self.every_s = 60.0 if every_s is None else every_s
        # The current wait, if any: reason, start, and whether it was reported; and the time of the last report.
        self._reason: str | None = None
        self._began, self._told, self._told_at = 0.0, False, -math.inf
        if screen is not None:
            # 10 s of values, so that the rate neither jumps nor lags.
            self.every_s, self._looks = BAR_EVERY_S, deque(maxlen=51)
            column = Column(no_wrap=True, overflow="ellipsis")
            figures = TextColumn("{task.fields[figures]}", markup=False, table_column=column)
            columns = (BarColumn(bar_width=20), TaskProgressColumn(), figures, TimeRemainingColumn())
            self._bar = Progress(*columns, console=screen, transient=True, auto_refresh=False)
            self._task = self._bar.add_task("", total=None, figures="")

    def start(self, out: str, tally: Tally) -> None:
        """Reports the start of the run."""
        self._looks.append(tally)
        self._event("start", out=out, **_values(tally), sources=tally.sources)
        if self._screen is not None:
            with contextlib.suppress(OSError):
                self._bar.start()
            self.show(tally)

    def show(self, tally: Tally) -> None:
        """Shows the progress; the rate is the one since the last call, or in a bar over the last 10 seconds."""
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
        """Sets the reason why the run waits, None if it continues. May be called at any rate."""
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
        """Writes a message."""
        if self._screen is None:
            self._event("note", message=text)
        else:
            say(f"{NAME}: {text}", self._screen)

    def warn(self, text: str) -> None:
        """Writes a warning."""
        say(f"{NAME}: warning: {text}", self._screen)

    def log_every(self, seconds: float) -> None:
        """Sets the interval between two log lines; has no effect on a bar."""
        if self._screen is None:
            self.every_s = seconds

    def finish(self, outcome: Outcome) -> None:
        """Writes the result as the last line: key=value for a log, a sentence for users."""
        more = {} if outcome.end == "finished" else {"message": str(outcome)}
        line = log_line("end", result=outcome.end, out=outcome.out, **_values(outcome.tally), **more)
        say(line if self._log else summary(outcome))

    def close(self) -> None:
        """Removes the bar. May be called twice."""
        if self._screen is not None:
            with contextlib.suppress(OSError):
                self._bar.stop()

    def _event(self, event: str, **values: Any) -> None:
        if not self._quiet:
            say(log_line(event, **values))

    def _is_lasting(self) -> bool:
        """Whether the wait is long enough to be reported: as long as for `waiting` in head.json."""
        return self.clock() - self._began >= 5.0


def choose_display(quiet: bool, log_every_s: float, metrics: Metrics) -> Display:
    """Returns the display for stderr: a bar or a log, or if `quiet` only warnings and the last line."""
    console = Console(stderr=True)
    screen, every_s = (console, None) if console.is_terminal else (None, log_every_s)
    display = Display(screen is None, None if quiet else every_s, None if quiet else screen)
    display.metrics = metrics
    return display


def say(line: str, screen: Console | None = None) -> None:
    """Prints a line on stderr, ignoring errors; above the bar if there is one on the screen."""
    with contextlib.suppress(OSError, ValueError):
        if screen is not None:
            screen.print(one_line(line), markup=False, highlight=False, soft_wrap=True)
        elif sys.stderr is not None:  # None if closed before the start; then print() would use stdout
            print(one_line(line), file=sys.stderr, flush=True)


Reason = Literal["source", "rate", "limit", "deadlock"]
"""Reasons of a wait: rows of a source, the time of --rate, room below a limit, and room that can never become free."""

STATES: Final = ("running", "waiting", "idle", "finished", "failed")  # as in head.json
_SEAL_BUCKETS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
"""Upper bounds in seconds, from small chunks on a fast disk to large chunks on a slow share."""

_FIGURES: Final[tuple[tuple[str, str, str, str, dict[str, float]], ...]] = (
    ("samples", "Counter", "Rows published by this process", "", {"": 0}),
    ("bytes", "Counter", "Bytes of the chunks published by this process", "", {"": 0}),
    ("chunks", "Counter", "Chunks published by this process", "", {"": 0}),
    ("stream_chunks", "Gauge", "Chunks of the stream", "", {"": 0}),
    ("last_publish_seconds", "Gauge", "Time of the last publish, since 1970", "", {"": 0}),
    ("source_rows", "Counter", "Rows read", "source", {}),
    ("refused_rows", "Counter", "Rows refused", "kind", {"skipped": 0, "quarantined": 0}),
    # Unknown at the start, so not 0.
    ("ahead_chunks", "Gauge", "Chunks published beyond the slowest reader's hint", "", {"": math.nan}),
    ("consumer_lag_chunks", "Gauge", "Chunks published beyond durable checkpoints", "consumer", {}),
    ("disk_bytes", "Gauge", "Bytes used by the stream", "", {"": math.nan}),
    ("waiting", "Gauge", "Whether the producer waits for this reason", "reason", dict.fromkeys(get_args(Reason), 0)),
    ("wait_seconds", "Counter", "Time waited for this reason", "reason", dict.fromkeys(get_args(Reason), 0.0)),
    ("state", "Gauge", "State of the producer", "state", dict.fromkeys(STATES, 0)),
)
"""Each metric with its kind, its description, the name of its label, and its values at the start."""

MAX_LABELS: Final = 100  # values of a label: enough for users, and far below the number that burdens a server
OTHERS: Final = "(others)"


class Metrics:
    """The metrics of a run, served to Prometheus over HTTP at `address` if a port is given; 0 chooses a free port.

    The first `MAX_LABELS` sources and consumers have their own label, the rest share one. If the run is one of several
    writers, all metrics have its name as the label `writer`. The constructor raises ExtraMissing without
    prometheus-client, and SettingInvalid if the port is unavailable; no method raises.
    """

    clock: Callable[[], float] = time.monotonic

    def __init__(self, host: str = "", port: int | None = None, writer: str | None = None) -> None:
        self.address: str | None = None
        self._writer = {} if writer is None else {"writer": writer}
        self._values = {name: dict(values) for name, *_, values in _FIGURES}
        self._seals, self._seal_s = [0] * (len(_SEAL_BUCKETS) + 1), 0.0
        self._reason: Reason | None = None
        self._since = 0.0
        # Without the lock a request between two steps could return a sum that decreases later; counters must not.
        self._lock = threading.RLock()
        if port is None:
            return
        client = load_extra("--metrics-port", "prometheus_client", "producer")
        # A separate registry, without the metrics of other code in this process.
        registry = client.CollectorRegistry()
        registry.register(self)
        try:
            self._server, self._thread = client.start_http_server(port, host, registry)
        except (OSError, OverflowError) as cause:
            reason = (getattr(cause, "strerror", None) or str(cause)).lower()
            text = f"--metrics-port: cannot listen on {host}:{port} ({reason}); choose another one, or 0 for a free one"
            raise SettingInvalid(text, option="--metrics-port") from None
        self.address = f"http://{host}:{self._server.server_port}/metrics"

    def published(self, chunks: int, samples: int, size: int, seconds: float) -> None:
        """Records a published chunk: its rows and bytes, and the seconds from its last row to its durable seal."""
        for name, more in (("samples", samples), ("bytes", size), ("chunks", 1)):
            self._values[name][""] += more
        self._values |= {"stream_chunks": {"": chunks}, "last_publish_seconds": {"": time.time()}}
        self._seals[bisect_left(_SEAL_BUCKETS, seconds)] += 1
        self._seal_s += seconds
        self._tell_one("state", "running")

    def taken(self, source: str, rows: int) -> None:
        """Counts rows that were read from a source."""
        sources = self._values["source_rows"]
        name = source if source in sources or len(sources) < MAX_LABELS else OTHERS
        sources[name] = sources.get(name, 0) + rows

    def refused(self, kind: Literal["skipped", "quarantined"], rows: int = 1) -> None:
        """Counts refused rows."""
        self._values["refused_rows"][kind] += rows

    def waits(self, reason: Reason | None) -> None:
        """Sets the reason why the run waits, None if it continues. May be called at any rate."""
        with self._lock:
            self._values["wait_seconds"], self._since, self._reason = self.waited(), self.clock(), reason
        self._tell_one("waiting", reason)
        self._tell_one("state", "running" if reason is None else "waiting")

    def consumers(self, lags: Mapping[str, int], ahead: int | None) -> None:
        """Sets how far, in chunks, the run is ahead of each consumer's checkpoint and of the slowest hint, if any."""
        shown: dict[str, float] = dict(sorted(lags.items())[:MAX_LABELS])
        if len(lags) > MAX_LABELS:
            shown[OTHERS] = max(lag for name, lag in lags.items() if name not in shown)
        self._values["consumer_lag_chunks"] = shown
        self._values["ahead_chunks"] = {"": math.nan if ahead is None else ahead}

    def disk(self, size: int) -> None:
        """Sets the bytes used by the stream."""
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
        """Returns the seconds waited for each reason until now; these never decrease."""
        with self._lock:
            waited = dict(self._values["wait_seconds"])
            if self._reason is not None:
                waited[self._reason] += max(0.0, self.clock() - self._since)
            return waited

    def collect(self) -> Iterator[Any]:
        """Yields all metrics in the types of the Prometheus client, which calls this from its thread."""
        from prometheus_client import core

        for name, kind, text, label, _ in _FIGURES:
            labels = [*([label] if label else []), *self._writer]
            family = getattr(core, f"{kind}MetricFamily")(f"lazyshard_producer_{name}", text, labels=labels)
            # A copy: the run continues meanwhile.
            for key, value in (self.waited() if name == "wait_seconds" else dict(self._values[name])).items():
                family.add_metric([*([key] if label else []), *self._writer.values()], value)
            yield family
        text = "Time from a chunk's last row to its durable seal"
        seals = core.HistogramMetricFamily("lazyshard_producer_seal_seconds", text, labels=[*self._writer])
        bounds = [*map(str, _SEAL_BUCKETS), "+Inf"]
        buckets = list(zip(bounds, accumulate(self._seals), strict=True))
        seals.add_metric([*self._writer.values()], buckets, self._seal_s)
        yield seals
