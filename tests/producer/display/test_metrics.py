"""What Prometheus gets to see, read over HTTP as it would."""

import contextlib
import math
import socket
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lazyshard_producer.cli import main
from lazyshard_producer.display import MAX_LABELS, OTHERS, Metrics, Reason
from lazyshard_producer.errors import ExtraMissing, SettingInvalid
from tests.harness.processes.producing import assert_one_line, rows, run_arguments
from tests.stream.streams import raised, refusal_of


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def metrics(clock: Clock) -> Iterator[Metrics]:
    made = Metrics("127.0.0.1", 0)
    made.clock = clock
    yield made
    made.close()


def scrape(metrics: Metrics, begin: str = "") -> dict[str, float]:
    """The figures whose names begin so."""
    assert metrics.address is not None
    with urllib.request.urlopen(metrics.address, timeout=30) as answer:
        lines = answer.read().decode().splitlines()
    pairs = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    found = {name.removeprefix("lazyshard_producer_"): float(value) for name, value in pairs}
    return {name: value for name, value in found.items() if name.startswith(begin)}


def test_what_is_counted(metrics: Metrics, clock: Clock) -> None:
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


def test_closed_it_answers_no_more_and_its_port_is_free() -> None:
    first = Metrics("127.0.0.1", 0)
    assert first.address is not None
    port = int(first.address.rsplit(":", 1)[1].partition("/")[0])
    first.close()
    first.close()
    raised(urllib.error.URLError, scrape, first)
    Metrics("127.0.0.1", port).close()


def test_a_taken_port_is_an_error_before_anything_is_made(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a").write_bytes(rows(0, 3))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(run_arguments(tmp_path / "out", [tmp_path / "a"], 10, "--metrics-port", port)) == 2
    assert_one_line(
        capsys.readouterr().err, f"--metrics-port: cannot listen on 127.0.0.1:{port} ", "address already in use"
    )
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("host", ["192.0.2.1", "nowhere.invalid", "1.2.3.4.5"])
def test_an_address_that_is_not_ours(host: str) -> None:
    assert refusal_of(SettingInvalid, f"{host}:0 ", Metrics, host, 0).option == "--metrics-port"


def test_without_prometheus_the_extra_is_named_where_there_is_a_port(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    error = raised(ExtraMissing, Metrics, "127.0.0.1", 0)
    assert (error.package, error.extra) == ("prometheus-client", "producer")
    assert Metrics("127.0.0.1", None).address is None


STEPS = st.tuples(st.sampled_from((None, "source", "limit")), st.integers(0, 100), st.booleans())


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


def test_label_of_a_writer() -> None:
    with contextlib.closing(Metrics("127.0.0.1", 0, "vllm-3")) as metrics:
        metrics.taken("a.jsonl", 5)
        found = scrape(metrics)
        assert found['source_rows_total{source="a.jsonl",writer="vllm-3"}'] == 5
        assert [name for name in found if 'writer="vllm-3"' not in name] == []
