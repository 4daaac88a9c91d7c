"""What a run deletes behind its consumers, and what it keeps."""

from pathlib import Path
from typing import Any

import pytest

from lazyshard.errors import ProducerFenced
from lazyshard.format.names import chunk_name, seal_name
from lazyshard_producer.configuration.quantities import Amount
from lazyshard_producer.holding.shelf import chunk_size
from tests.producer.holding.holdback_bench import Bench


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path / "stream")


def test_consumed_chunks_are_deleted_below_every_cursor(bench: Bench) -> None:
    bench.limited(retain="consumed")
    bench.publish(6)
    assert bench.chunks() == [0, 1, 2, 3, 4, 5]
    bench.commit("a", 5)
    bench.commit("b", 3)
    bench.publish()
    assert bench.chunks() == [3, 4, 5, 6]
    assert bench.retired() == 3
    bench.commit("b", 4)
    bench.publish()
    assert bench.chunks() == [4, 5, 6, 7]
    # Done with all there is: the newest chunk stays.
    bench.commit("a", 9)
    bench.commit("b", 9)
    bench.publish()
    assert bench.chunks() == [8]


@pytest.mark.parametrize("retain", ["all", 4])
def test_chunks_that_are_retained_stay(bench: Bench, retain: Any) -> None:
    bench.limited(retain=retain)
    bench.publish(5)
    bench.commit("a", 5)
    bench.publish()
    assert bench.chunks() == ([0, 1, 2, 3, 4, 5] if retain == "all" else [2, 3, 4, 5])


def test_nothing_is_deleted_before_those_named_have_a_cursor(bench: Bench) -> None:
    bench.limited(retain="consumed", consumers=("a", "b"))
    bench.commit("a", 2)
    bench.publish(3)
    bench.need("b", 9)
    bench.publish()
    assert bench.chunks() == [0, 1, 2, 3]
    bench.commit("b", 2)
    bench.publish()
    assert bench.chunks() == [2, 3, 4]


def test_nothing_is_deleted_where_nobody_consumes(bench: Bench) -> None:
    bench.limited(retain="consumed")
    bench.publish(3)
    (bench.out / "cursors").mkdir()
    bench.publish()
    assert bench.chunks() == [0, 1, 2, 3]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b'{"format":1,"consumer":"b","stream_id":null,"consumed":1,"chunks_before":2,"plan":{},"updated_at":1.0}',
    ],
)
def test_a_torn_cursor_deletes_nothing(bench: Bench, content: bytes) -> None:
    bench.limited(retain="consumed")
    bench.commit("a", 2)
    (bench.out / "cursors" / "b.json").write_bytes(content)
    bench.publish(4)
    assert bench.chunks() == [0, 1, 2, 3]


def test_a_cursor_of_another_stream_or_ahead_of_the_data_deletes_nothing(bench: Bench) -> None:
    bench.limited(retain="consumed", max_disk=1)
    bench.commit("a", 2)
    bench.commit("b", 3, stream_id="0" * 32)
    bench.publish(4)
    assert bench.chunks() == [0, 1, 2, 3]
    hold = bench.ask()
    assert hold.stalled
    assert f"b.json: of stream {'0' * 32}" in hold.reason
    assert hold.reason.endswith(f"; if 'b' will not come back, run `lazyshard forget {bench.out} b`")
    bench.commit("b", 9)
    bench.publish(4)
    assert bench.chunks() == [0, 1, 2, 3, 4, 5, 6, 7]
    assert "b.json: is done with 9 chunks, of which only 8 are published" in bench.ask().reason
    bench.commit("b", 7)
    bench.publish()
    assert bench.chunks() == [2, 3, 4, 5, 6, 7, 8]


def test_a_chunk_that_cannot_be_deleted_is_told_once_and_tried_again(bench: Bench) -> None:
    bench.publish()
    bench.limited(retain="consumed", max_disk=4 * bench.size())
    bench.publish(3)
    seal = bench.out / seal_name(0)
    content = seal.read_bytes()
    seal.unlink()
    seal.mkdir()
    bench.commit("a", 3)
    bench.need("a", 9)
    hold = bench.ask()
    assert (hold.deadlock, hold.stalled) == (False, True)
    assert f"chunks that nobody needs cannot be deleted: [Errno 21] Is a directory: '{seal}'" in hold.reason
    assert bench.ask() is not None
    assert bench.warnings == [
        f"{bench.out}: chunks that nobody needs cannot be deleted: [Errno 21] Is a directory: '{seal}'"
    ]
    seal.rmdir()
    seal.write_bytes(content)
    assert bench.ask() is None
    assert bench.chunks() == [3]
    assert bench.holdback.stock is not None
    assert bench.holdback.stock.size == bench.size()


def test_what_was_deleted_before_an_error_is_free(bench: Bench) -> None:
    bench.publish(4)
    one = chunk_size(bench.out, 0)
    bench.limited(retain="consumed", max_disk=10**6)
    assert bench.ask() is None
    assert bench.holdback.stock is not None
    before = bench.holdback.stock.size
    seal = bench.out / seal_name(1)
    seal.unlink()
    seal.mkdir()
    bench.commit("a", 3)
    bench.ask()
    assert not (bench.out / chunk_name(0)).exists()
    assert (before - bench.holdback.stock.size, bench.holdback.stock.first) == (one, 0)


def test_consumers_that_cannot_be_listed_are_told_once_and_nothing_is_deleted(bench: Bench) -> None:
    bench.limited(retain="consumed", max_ahead=Amount(number=9, unit="chunks"))
    (bench.out / "cursors").write_bytes(b"")
    bench.publish(3)
    assert bench.ask() is None
    assert len(bench.warnings) == 1
    assert "how far its consumers are cannot be read" in bench.warnings[0]
    assert "Not a directory" in bench.warnings[0]
    assert bench.chunks() == [0, 1, 2]
    (bench.out / "cursors").unlink()
    bench.commit("a", 2)
    bench.publish()
    assert bench.chunks() == [2, 3]


def test_many_chunks_are_deleted_bit_by_bit(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lazyshard_producer.holding.holdback.DELETED_AT_ONCE", 2)
    bench.limited(retain="consumed")
    bench.publish(6)
    bench.commit("a", 5)
    assert [bench.ask() or bench.chunks()[0] for _ in range(4)] == [2, 4, 5, 5]


def test_a_producer_that_was_fenced_deletes_nothing(bench: Bench) -> None:
    def check() -> None:
        raise ProducerFenced("taken over")

    bench.limited(check, retain="consumed")
    bench.commit("a", 1)
    bench.publish(after_s=0.0)
    bench.now += 1.0
    bench.writer.write({})
    bench.writer.write({})
    with pytest.raises(ProducerFenced):
        bench.holdback.after_publish(2)
    assert (bench.out / chunk_name(0)).exists()


def test_a_restart_goes_on_deleting_where_the_last_run_stopped(bench: Bench) -> None:
    bench.limited(retain="consumed", max_disk=10**6)
    bench.publish(4)
    bench.commit("a", 3)
    bench.publish()
    assert bench.chunks() == [3, 4]
    bench.writer.close(end=False)

    again = Bench(bench.out)
    again.limited(retain="consumed", max_disk=10**6)
    assert again.ask() is None
    assert again.holdback.stock is not None
    assert (again.holdback.stock.first, again.holdback.stock.stop) == (3, 5)
    again.commit("a", 5)
    again.publish()
    assert again.chunks() == [5]
    assert again.holdback.stock.size == again.size()
