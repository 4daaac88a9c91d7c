"""What a run looks at, and how often: neither the chunks again and again, nor its consumers all the time."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lazyshard.format.names import chunk_name, seal_name
from lazyshard.stream.consumers import list_consumers
from lazyshard_producer.configuration.quantities import Amount
from lazyshard_producer.holding.shelf import Stock, measure_stock
from tests.producer.holding.holdback_bench import Bench


def recording(function: Callable[..., Any], seen: list[str]) -> Callable[..., Any]:
    def call(path: Any, **options: Any) -> Any:
        seen.append(str(path))
        return function(path, **options)

    return call


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path / "stream")


def test_the_consumers_are_looked_at_twice_a_second_at_most(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    looks = 0

    def counted(*arguments: Any) -> Any:
        nonlocal looks
        looks += 1
        return list_consumers(*arguments)

    monkeypatch.setattr("lazyshard_producer.holding.shelf.list_consumers", counted)
    bench.limited(retain="consumed", max_ahead=Amount(number=1000, unit="chunks"))
    for _ in range(100):
        assert bench.ask(0.0) is None
        bench.publish(after_s=0.0625)
    assert looks == 13
    # While it is held, five times a second.
    bench.limited(max_ahead=Amount(number=100, unit="chunks"))
    looks = 0
    for _ in range(100):
        assert bench.ask(0.0625) is not None
    assert looks == 25


def test_a_publish_lists_no_chunks(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.limited(retain="consumed", max_disk=10**6, min_free_disk=1)
    bench.publish(20)
    assert bench.ask() is None
    listed: list[str] = []
    bench.commit("a", 15)
    with monkeypatch.context() as patch:
        for name in ("listdir", "scandir"):
            patch.setattr(os, name, recording(getattr(os, name), listed))
        bench.publish()
        assert bench.ask() is None
    assert bench.chunks() == list(range(15, 21))
    assert set(listed) == {str(bench.out / "cursors")}


def test_the_chunks_are_listed_at_the_start_for_max_disk_alone(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.publish(3)
    listed: list[str] = []
    for name in ("listdir", "scandir"):
        monkeypatch.setattr(os, name, recording(getattr(os, name), listed))
    for limits in ({"min_free_disk": 1}, {"max_ahead": Amount(number=10**6, unit="bytes")}, {"max_disk": 10**6}):
        assert str(bench.out) not in listed
        bench.limited(**limits)
        assert bench.ask() is None
    assert listed.count(str(bench.out)) == 1


def test_what_is_on_disk_is_known_without_looking_again(bench: Bench) -> None:
    bench.limited(retain=3, max_disk=10**6)
    for number in range(12):
        bench.publish(width=10 * number)
        bench.commit("a", number // 2)
        assert bench.holdback.stock is not None
        assert (bench.holdback.stock.size, bench.holdback.stock.first) == (bench.size(), bench.chunks()[0])
    assert bench.holdback.stock is not None
    largest = bench.holdback.stock.largest
    # As a restart finds it: data and seal of the largest are looked at apart from each other.
    bench.limited(retain=3, max_disk=10**6)
    assert bench.ask() is None
    assert bench.holdback.stock is not None
    assert (bench.holdback.stock.size, bench.holdback.stock.largest) == (bench.size(), largest)
    # Without a limit on it, from some of the chunks; here that is all of them.
    bench.limited(min_free_disk=1)
    assert bench.ask() is None
    assert bench.holdback.stock is not None
    assert (bench.holdback.stock.size, bench.holdback.stock.chunks) == (bench.size(), len(bench.chunks()))
    bench.limited()
    assert bench.ask() is None
    assert bench.holdback.stock is None


def test_many_chunks_are_measured_by_some_of_them_unless_a_limit_needs_the_sum(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for chunk in range(10, 310):
        (tmp_path / chunk_name(chunk)).write_bytes(bytes(90 + chunk % 2))
        (tmp_path / seal_name(chunk)).write_bytes(bytes(10))
    (tmp_path / "head.json").write_bytes(bytes(1000))
    assert measure_stock(tmp_path, 10, 310, exact=True) == Stock(first=10, stop=310, size=300 * 100 + 150, largest=101)
    stated: list[str] = []
    monkeypatch.setattr(os, "stat", recording(os.stat, stated))
    some = measure_stock(tmp_path, 10, 310, exact=False)
    assert len(stated) == 2 * 128
    assert (some.first, some.stop, some.largest) == (10, 310, 101)
    assert 30_000 <= some.size <= 30_300
    assert measure_stock(tmp_path, 310, 310, exact=False) == Stock(first=310, stop=310, size=0, largest=0)
