"""What Prometheus gets to see, over HTTP; what is shown while it runs: a bar, the lines of the log, the last line."""

import contextlib
import io
import math
import os
import re
import shlex
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from lazyshard_producer.cli import main
from lazyshard_producer.display import MAX_LABELS, OTHERS, Display, Metrics, Outcome, Reason, Tally, summary
from lazyshard_producer.errors import ExtraMissing, SettingInvalid
from tests.cli.commands import terminal
from tests.harness.processes.environment import environment
from tests.harness.processes.producing import rows, run_arguments
from tests.producer.commands import Fails
from tests.stream.streams import raised, refusal_of

COUNTS = {"samples": 1234, "published": 1200, "chunks": 12, "new": 234, "blank_lines": 1, "duplicate_key_rows": 2}
TALLY = Tally(**COUNTS, bytes=10, bytes_total=20, seconds=2.0)
STEPS = st.tuples(st.sampled_from((None, "source", "limit")), st.integers(0, 100), st.booleans())


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def metrics() -> Iterator[Metrics]:
    with contextlib.closing(Metrics("127.0.0.1", 0)) as made:
        yield made


def scrape(metrics: Metrics, begin: str = "") -> dict[str, float]:
    assert metrics.address is not None
    with urllib.request.urlopen(metrics.address, timeout=30) as answer:
        lines = answer.read().decode().splitlines()
    pairs = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    found = {name.removeprefix("lazyshard_producer_"): float(value) for name, value in pairs}
    return {name: value for name, value in found.items() if name.startswith(begin)}


def test_what_is_counted(metrics: Metrics) -> None:
    clock = metrics.clock = Clock()
    metrics.published(7, 10, 500, 0.004)
    metrics.published(8, 3, 100, 0.2)
    metrics.taken('a "b"\n\\.jsonl', 5)
    metrics.taken('a "b"\n\\.jsonl', 2)
    metrics.refused("skipped")
    metrics.refused("quarantined", 4)
    metrics.disk(12345)
    metrics.waits("rate")
    clock.now += 2
    assert [name for name, value in scrape(metrics, "waiting").items() if value] == ['waiting{reason="rate"}']
    metrics.waits(None)
    found = scrape(metrics)
    expected = {
        **{"samples_total": 13, "bytes_total": 600, "chunks_total": 2, "stream_chunks": 8, "disk_bytes": 12345},
        "last_publish_seconds": pytest.approx(time.time(), abs=600),
        **{"seal_seconds_count": 2, "seal_seconds_sum": pytest.approx(0.204)},
        **{'seal_seconds_bucket{le="0.0025"}': 0, 'seal_seconds_bucket{le="0.005"}': 1},
        **{'seal_seconds_bucket{le="0.1"}': 1, 'seal_seconds_bucket{le="0.25"}': 2},
        'source_rows_total{source="a \\"b\\"\\n\\\\.jsonl"}': 7,
        'refused_rows_total{kind="skipped"}': 1,
        'refused_rows_total{kind="quarantined"}': 4,
        'wait_seconds_total{reason="rate"}': 2,
    }
    assert {name: found[name] for name in expected} == expected
    states = scrape(metrics, "state{")
    assert len(states) == 5
    assert [name for name, value in states.items() if value] == ['state{state="running"}']


def test_labels_do_not_grow_with_the_sources(metrics: Metrics) -> None:
    for number in range(MAX_LABELS + 5):
        metrics.taken(f"s{number}", 2)
    metrics.taken("s0", 1)
    found = scrape(metrics, "source_rows_total")
    assert len(found) == MAX_LABELS + 1
    assert found['source_rows_total{source="s0"}'] == 3
    assert found[f'source_rows_total{{source="{OTHERS}"}}'] == 10


def test_consumers_come_and_go_and_of_many_the_rest_share_the_largest_lag(metrics: Metrics) -> None:
    lag = 'consumer_lag_chunks{{consumer="{}"}}'.format
    metrics.consumers({"train": 5, "eval": 7}, 5)
    assert scrape(metrics, "consumer_lag") == {lag("train"): 5, lag("eval"): 7}
    assert scrape(metrics)["ahead_chunks"] == 5
    metrics.consumers({"train": 4}, None)
    assert scrape(metrics, "consumer_lag") == {lag("train"): 4}
    assert math.isnan(scrape(metrics)["ahead_chunks"])
    metrics.consumers({f"c{number:03}": number for number in range(MAX_LABELS + 3)}, 0)
    found = scrape(metrics, "consumer_lag")
    assert (len(found), found[lag(OTHERS)]) == (MAX_LABELS + 1, MAX_LABELS + 2)
    metrics.consumers({"c000": 1}, 0)
    assert scrape(metrics, "consumer_lag") == {lag("c000"): 1}


def test_label_of_a_writer_and_closed_it_answers_no_more_and_its_port_is_free() -> None:
    first = Metrics("127.0.0.1", 0, "vllm-3")
    first.taken("a.jsonl", 5)
    found = scrape(first)
    assert found['source_rows_total{source="a.jsonl",writer="vllm-3"}'] == 5
    assert [name for name in found if 'writer="vllm-3"' not in name] == []
    assert first.address is not None
    port = int(first.address.rsplit(":", 1)[1].partition("/")[0])
    first.close()
    first.close()
    raised(urllib.error.URLError, scrape, first)
    Metrics("127.0.0.1", port).close()


def test_a_taken_port_is_an_error_before_anything_is_made(tmp_path: Path, fails: Fails) -> None:
    (tmp_path / "a").write_bytes(rows(0, 3))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        says = (f"--metrics-port: cannot listen on 127.0.0.1:{port} ", "address already in use")
        fails(run_arguments(tmp_path / "out", [tmp_path / "a"], 10, "--metrics-port", port), 2, *says)
    assert not (tmp_path / "out").exists()


def test_metrics_that_cannot_be_served(monkeypatch: pytest.MonkeyPatch) -> None:
    for host in ("192.0.2.1", "nowhere.invalid", "1.2.3.4.5"):
        assert refusal_of(SettingInvalid, f"{host}:0 ", Metrics, host, 0).option == "--metrics-port"
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    error = raised(ExtraMissing, Metrics, "127.0.0.1", 0)
    assert (error.package, error.extra) == ("prometheus-client", "producer")
    assert Metrics("127.0.0.1", None).address is None


@given(st.lists(STEPS, max_size=20))
def test_looks_change_nothing_and_sums_never_fall(steps: list[tuple[Reason | None, int, bool]]) -> None:
    now = 0.0
    metrics = Metrics()
    metrics.clock = lambda: now
    expected = metrics.waited()
    for reason, seconds, look in steps:
        metrics.waits(reason)
        assert metrics.waited() == expected
        now += seconds
        if reason is not None:
            expected[reason] += seconds
        if look:
            assert metrics.waited() == expected
    assert metrics.waited() == expected


def test_the_last_line_tells_the_end_and_the_counts() -> None:
    finished = summary(Outcome("finished", "out", replace(TALLY, refused_rows=3)))
    for part in ("finished: out", "1,234", "12 chunks", "117 samples/s", "1 blank line", "3 rows refused"):
        assert part in finished
    # 34 rows of the chunk in hand are not published.
    interrupted = summary(Outcome("interrupted", "out", TALLY))
    for part in ("interrupted: ", "1,200 samples", "(34 rows "):
        assert part in interrupted


def fields(line: str) -> dict[str, str]:
    return dict(part.split("=", 1) for part in shlex.split(line))


def test_the_log_tells_the_rate_of_late_and_of_the_whole_run_at_its_end(capsys: pytest.CaptureFixture[str]) -> None:
    log = Display(True, 60.0)
    log.start("out", replace(TALLY, new=0, seconds=0.0, sources=3, bytes_total=None))
    log.show(replace(TALLY, new=600, seconds=60.0))
    log.show(replace(TALLY, new=606, seconds=120.0, refused_rows=2))
    log.finish(Outcome("finished", "out", replace(TALLY, new=600, seconds=120.0)))
    first, second, third, last = map(fields, capsys.readouterr().err.splitlines())
    assert (first["event"], first["sources"], "bytes_total" in first) == ("start", "3", False)
    assert (second["event"], second["rate"], third["rate"]) == ("progress", "10.0", "0.1")
    assert (third["refused_rows"], "waiting" in third) == ("2", False)
    assert (last["rate"], last["bytes_total"]) == ("5.0", "20")


def test_the_log_tells_of_a_wait_that_lasts_and_of_its_end(capsys: pytest.CaptureFixture[str]) -> None:
    clock, log = Clock(), Display(True, 60.0)
    log.clock = clock
    log.wait("64 chunks ahead")
    clock.now += 4.9
    log.wait("64 chunks ahead")
    assert capsys.readouterr().err == ""
    clock.now += 0.2
    log.wait("65 chunks ahead")
    log.wait("66 chunks ahead")
    log.show(TALLY)
    clock.now += 10
    log.wait(None)
    log.wait(None)
    log.show(TALLY)
    begun, during, over, after = map(fields, capsys.readouterr().err.splitlines())
    assert (begun["event"], begun["reason"]) == ("waiting", "65 chunks ahead")
    assert (during["event"], during["waiting"]) == ("progress", "66 chunks ahead")
    assert (over["event"], over["waited_seconds"]) == ("resumed", "15.1")
    assert "waiting" not in after


def test_waits_one_after_another_get_a_line_in_a_while(capsys: pytest.CaptureFixture[str]) -> None:
    clock, log = Clock(), Display(True, 5.0)
    log.clock = clock
    log.log_every(60.0)
    assert log.every_s == 60.0
    for _ in range(20):
        for _ in range(7):
            log.wait("new lines")
            clock.now += 1
        log.wait(None)
    events = [fields(line)["event"] for line in capsys.readouterr().err.splitlines()]
    # 140 seconds: at 5, 68 and 131.
    assert events == ["waiting", "resumed"] * 3


@pytest.mark.parametrize("reason", ["new lines in [bold]in (3 files open)", "x" * 500])
def test_a_bar_without_a_total_counts_and_tells_what_it_waits_for_in_its_line(reason: str) -> None:
    text, clock = io.StringIO(), Clock()
    screen = Console(file=text, force_terminal=True, width=100, height=3, color_system=None)
    bar = Display(False, screen=screen)
    bar.clock, every_s = clock, bar.every_s
    live = replace(TALLY, bytes_total=None)
    bar.start("out", live)
    bar.wait(reason)
    clock.now += 6
    bar.show(live)
    bar.log_every(5.0)
    bar.note("metrics at http://x")
    bar.close()
    bar.close()
    lines = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text.getvalue()).replace("\r", "\n").splitlines()
    assert any(f"1,234 samples  0/s  12 chunks  waiting: {reason[:20]}" in line for line in lines)
    assert any(reason in line for line in lines) == (len(reason) < 100)
    assert all(len(line) <= 100 for line in lines)
    assert "lazyshard-producer: metrics at http://x" in lines
    assert "%" not in text.getvalue()
    assert bar.every_s == every_s


def test_log_has_a_line_at_start_and_end_or_at_end_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a").write_bytes(rows(0, 25))
    for more, events in ((), ["start", "end"]), (("--no-progress",), ["end"]):
        assert main(run_arguments(tmp_path / f"out{len(more)}", [tmp_path / "a"], 10, *more)) == 0
        captured = capsys.readouterr()
        told = [fields(line) for line in captured.err.splitlines()]
        assert (captured.out, [line["event"] for line in told]) == ("", events)
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", told[0]["time"])
        last = [told[-1][name] for name in ("result", "samples", "published", "chunks")]
        assert last == ["finished", "25", "25", "3"]


def test_a_stderr_that_nobody_reads_is_no_reason_to_stop(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(rows(0, 300))
    nobody, broken = os.pipe()
    os.close(nobody)
    command = [sys.executable, "-m", "lazyshard_producer", *run_arguments(tmp_path / "out", [tmp_path / "a"], 10)]
    try:
        assert subprocess.run(command, stderr=broken, env=environment(), timeout=60).returncode == 0
    finally:
        os.close(broken)
    assert (tmp_path / "out" / "stream.end").exists()


def test_a_terminal_gets_a_bar_and_a_sentence(tmp_path: Path) -> None:
    source = tmp_path / "a[bold].jsonl"
    source.write_bytes(rows(0, 200) + b'{"id":1,"id":2}\n')
    arguments = run_arguments(tmp_path / "out", [source], 10, "--rate", 400)
    command = [sys.executable, "-m", "lazyshard_producer", *arguments]
    with terminal() as (fd, shown):
        env = environment() | {"TERM": "xterm"}
        done = subprocess.run(command, env=env, stdin=subprocess.DEVNULL, stderr=fd, timeout=60)
    assert done.returncode == 0
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", shown.decode())
    assert "samples  " in text and "%" in text
    assert f"warning: {source}:201: " in text
    last = text.replace("\r", "\n").strip().splitlines()[-1]
    assert last.startswith(f"finished: {tmp_path / 'out'} holds 201 samples in 21 chunks; ")
