"""What `lazyshard status` says of looks that are made up: pages, sentences, JSON values."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lazyshard.cli.status import failure_values, status_values
from lazyshard.cli.status_view import problems, status_lines, summary
from lazyshard.format.cursor import Cursor
from lazyshard.format.records import Head, ProducerState
from lazyshard.format.seal import MixedSource
from lazyshard.format.state import RunState
from lazyshard.inspection.disk_use import DiskUse, Lines
from lazyshard.part import Part
from lazyshard.stream.consumers import Consumer
from tests.cli.looks import HEAD, ID, NOW, consumer, outlook, survey, told


def state(name: ProducerState, note: str = "", age: float = 2.0) -> Head:
    return replace(HEAD, state=name, note=note, updated_at=NOW - age)


FINISHED = replace(state("finished"), ended=True)


def stepping(name: str, consumed: int, done: int) -> Consumer:
    """A consumer whose 2 ranks take micro batches of 2."""
    cursor = Cursor(name, ID, consumed, done, {"dp_size": 2, "batch_size": 2}, NOW)
    return Consumer(name, cursor, None, None)


def limited(name: str, consumed: int, done: int) -> Consumer:
    """A consumer of one rank that takes so many samples for all, and has had them."""
    state = RunState(ID, 10, 10, 0, 0, consumed, (Part(1, 1, consumed),), consumed)
    return Consumer(name, Cursor(name, ID, consumed, done, {}, NOW, state), None, None)


def test_page_of_one_look() -> None:
    readers = (consumer("eval", needs=1236), consumer("sft", consumed=11_000, done=1100, needs=1170, at=NOW - 723))
    looked = survey(
        consumers=readers,
        unread_since={"sft": NOW - 1502},
        census={"retired": 200},
        disk=DiskUse(10_340_000_000, False, 1e7, ()),
        quarantine=Lines(12, 3456, True),
    )
    assert "\n".join(status_lines(outlook(looked), watching=False)) == (
        "/data/stream\n"
        "the producer is running; waiting for data: 'eval' for 2 chunks\n"
        "\n"
        "published     1,234 chunks, 12,340 samples (10 a chunk); live\n"
        "deleted       200 chunks; 1,034 are there\n"
        "disk          about 10.3 GB used, 2.0 GB free\n"
        "quarantine    12 rows refused so far, 3.5 kB\n"
        "\n"
        "producer      running\n"
        "  process     12345 on node7, heartbeat 2 s old\n"
        "  rate        50.0 samples/s\n"
        "\n"
        "consumer      eval\n"
        "  checkpoint  none yet\n"
        "  lag         1,234 chunks, 12,340 samples\n"
        "  reading     needs 1,236 chunks, waits for 2 chunks; 4 s old\n"
        "  rate        not known from one look; see --watch\n"
        "\n"
        "consumer      sft\n"
        "  checkpoint  11,000 samples, done with 1,100 chunks; 12 min 3 s old\n"
        "  lag         134 chunks, 1,340 samples, 25 min 2 s\n"
        "  reading     needs 1,170 chunks, 64 chunks ahead of it; 12 min 3 s old\n"
        "  rate        not known"
    )


def test_page_of_a_second_look() -> None:
    first = survey(consumers=(consumer(needs=1100), consumer("slow", needs=1000), consumer("new", needs=1234)))
    later = survey(
        consumers=(
            consumer(needs=1194, at=NOW + 6),
            consumer("slow", needs=1010, at=NOW + 6),
            consumer("new", needs=1234),
        ),
        looked_at=NOW + 7,
    )
    lines = status_lines(outlook(first, later), watching=True)
    assert "disk          12.3 MB used, 2.0 GB free; full in about 11 h 6 min at this rate" in lines
    assert "  rate        50.0 samples/s; the stream grows by 50.0 kB/s" in lines
    assert "  rate        94.0 samples/s; has to wait in about 9 s at these rates" in lines
    assert "  rate        10.0 samples/s; does not have to wait at these rates" in lines
    assert "  rate        not known yet" in lines


def test_page_of_a_foreign_stream() -> None:
    looked = survey(head=None, census={"manifest": None, "native": False, "samples": None}, free=None)
    lines = status_lines(outlook(looked), watching=False)
    assert [line[:14].strip() for line in lines[2:]] == [
        "",
        "published",
        "disk",
        "",
        "producer",
        "rate",
        "",
        "consumers",
    ]
    assert lines[3:5] == ["published     1,234 chunks; live; made by a foreign producer", "disk          12.3 MB used"]


def test_rate_of_a_foreign_stream_is_in_chunks() -> None:
    foreign = {"manifest": None, "native": False, "samples": None}
    looks = [
        survey(
            head=None,
            census=foreign | {"chunks": 1234 + look},
            looked_at=NOW + 2 * look,
            consumers=(consumer(needs=1),),
        )
        for look in range(3)
    ]
    lines = status_lines(outlook(*looks), watching=True)
    assert "  rate        0.50 chunks/s; the stream grows by 5.0 kB/s" in lines


def test_page_of_a_shrinking_stream() -> None:
    looks = [survey(census={"retired": 10 * look}, looked_at=NOW + look, head=state("running")) for look in range(3)]
    lines = status_lines(outlook(*looks), watching=True)
    assert "  rate        50.0 samples/s; the stream shrinks by 50.0 kB/s" in lines


def test_pages_wrap_behind_their_labels() -> None:
    looked = survey(problems=("one two three four five six seven eight nine ten eleven twelve",))
    assert status_lines(outlook(looked), watching=False, width=40)[-3:] == [
        "problem       one two three four five",
        "              six seven eight nine ten",
        "              eleven twelve",
    ]


def test_pages_hold_no_control_characters() -> None:
    looked = survey(directory=Path("/data/a\nb\x1b[31m"), consumers=(consumer("a b\u2028", needs=1),))
    text = "".join(status_lines(outlook(looked), watching=False))
    assert text.isprintable()
    assert "/data/a\\nb\\x1b[31m" in text


WAITS = "64 chunks ahead of sft (limit --max-ahead 64)"
DONE = (consumer("a", consumed=12_340, done=1234), stepping("b", 12_337, done=1234))
LEFT = (consumer("a", consumed=12_340, done=1234), stepping("b", 12_337, done=1232))
OLDER = (consumer("a", consumed=12_340, done=1213), stepping("b", 12_337, done=1232))


@pytest.mark.parametrize(
    ("head", "consumers", "wanted"),
    [
        (HEAD, (consumer(needs=1231),), ["3 chunks ahead", "'sft'"]),
        (HEAD, (consumer("a", needs=1231), consumer("b", needs=1233)), ["3 chunks ahead", "'a'"]),
        (HEAD, (consumer(needs=1234),), ["0 chunks ahead", "'sft'"]),
        (HEAD, (consumer(needs=1235),), ["running", "waiting for data", "'sft' for 1 chunk"]),
        (HEAD, (consumer("a", needs=1), consumer("b", needs=1236)), ["running", "'b' for 2 chunks"]),
        (HEAD, (), ["running", "no consumer"]),
        (HEAD, (consumer("a", 10, done=1), consumer("b", 20, done=2)), ["running", "'a'", "1,233 chunks"]),
        # One that has had all that it may take is behind for good.
        (HEAD, (consumer("a", 12_320, done=1232), limited("b", 500, done=50)), ["running", "'a'", "2 chunks"]),
        (HEAD, (limited("b", 500, done=50),), ["running", "'b'", "max_total_samples", "chunks 50 to 1,233"]),
        (HEAD, (stepping("b", 12_337, done=1232),), ["running", "'b'", "3 samples"]),
        (HEAD, (consumer(problem="torn"),), ["running"]),
        (state("waiting", WAITS), (consumer(needs=1170),), ["waits", WAITS]),
        (state("waiting", "new lines"), (consumer(needs=1235),), ["waits: new lines", "'sft' for 1 chunk"]),
        (state("waiting", "nobody reads"), (), ["waits: nobody reads"]),
        (state("waiting"), (), ["waits", "no consumer"]),
        (state("idle", age=7200), (), ["stopped 2 h 0 min ago", "start it again", "no consumer"]),
        (state("failed"), (), ["failed 2 s ago", "log", "no consumer"]),
        (state("failed", "a.jsonl:7: no object"), (), ["failed 2 s ago: a.jsonl:7: no object", "no consumer"]),
        (state("running", age=125), (consumer(needs=1230),), ["dead", "2 min 5 s", "start it again", "4 chunks ahead"]),
        (FINISHED, (), ["ended", "no consumer"]),
        (FINISHED, (DONE[0], consumer("b", 12_330, done=1233)), ["ended", "'b'", "1 chunk"]),
        (FINISHED, DONE, ["ended", "every consumer is done"]),
        (FINISHED, (consumer(problem="torn"),), ["ended"]),
        (FINISHED, LEFT, ["ended", "'b'", "3 samples"]),
        (FINISHED, OLDER, ["ended", "'a'", "chunks 1,213 to 1,233"]),
    ],
)
def test_summary(head: Head, consumers: tuple[Consumer, ...], wanted: list[str]) -> None:
    text = summary(outlook(survey(head=head, consumers=consumers)))
    assert [part for part in wanted if part not in text] == []
    assert ("no consumer" in text) == ("no consumer" in wanted)


def test_rate_of_a_silent_producer_comes_with_its_age() -> None:
    silent = status_lines(outlook(survey(head=state("running", age=12))), watching=False)
    assert "  rate        50.0 samples/s, told 12 s ago; the stream" in "\n".join(silent)
    nothing = status_lines(outlook(survey(head=state("idle", age=12))), watching=False)
    assert "  rate        0 samples/s" in nothing


def test_producer_of_which_no_process_is_left() -> None:
    note = "--min-free-disk 1.0 GB: 0.9 GB are free, the next chunk may take 10.0 kB; --retain all deletes nothing"
    cases: list[tuple[dict[str, Any], list[str]]] = [
        ({"head": state("running", age=20), "gone": True}, ["20 s", "process is gone", "start it again"]),
        ({"head": state("waiting", age=1), "ended": True}, ["process has ended: start it again"]),
        # What it needs before it is started again.
        ({"head": state("waiting", age=1), "ended": True, "free": 9_999}, ["ended: make room, the disk is full"]),
        ({"head": state("waiting", note, age=1), "ended": True}, [f"ended: make room, for which it waited ({note})"]),
        ({"head": state("waiting", f"deadlock: {note}", age=1), "ended": True}, ["ended: make room", "deadlock"]),
    ]
    for values, wanted in cases:
        text = summary(outlook(survey(**values)))
        assert [part for part in ["the producer is dead", *wanted] if part not in text] == []

    def process(**values: Any) -> str:
        [line] = [line for line in status_lines(outlook(survey(**values)), watching=False) if "  process " in line]
        return line.partition("heartbeat ")[2]

    assert process(gone=True).startswith("2 s old; it is not to be seen on this")
    assert process(head=state("waiting", age=1), gone=True, ended=True) == "1 s old; it has ended"
    assert process(head=state("idle"), gone=True) == "2 s old"


@pytest.mark.parametrize(
    ("values", "wanted"),
    [
        ({"problems": ("head.json: torn",)}, [["head.json: torn"]]),
        (
            {"consumers": (consumer("a b", problem="cursors/a b.json: torn"),), "directory": Path("/my data")},
            [["consumer 'a b'", "cursors/a b.json: torn", "`lazyshard forget '/my data' 'a b'`"]],
        ),
        (
            {"consumers": (consumer(consumed=10, done=1), consumer("b", needs=1)), "census": {"retired": 2}},
            [["consumer 'sft'", "1 chunk only", "2 are deleted"]],
        ),
        ({"head": state("running", age=-90)}, [["clock is 1 min 30 s ahead"]]),
        ({"head": state("running", age=-4)}, []),
    ],
)
def test_problems(values: dict[str, Any], wanted: list[list[str]]) -> None:
    outlooked = outlook(survey(**values))
    for text, parts in zip(problems(outlooked), wanted, strict=True):
        assert [part for part in parts if part not in text] == []
    assert sum(line.startswith("problem ") for line in status_lines(outlooked, watching=False)) == len(wanted)


def test_json_of_one_look() -> None:
    looked = survey(
        head=state("waiting", "for rows"),
        consumers=(told("sft", consumed=11_000, done=1100, needs=1170, ranks=2),),
        unread_since={"sft": NOW - 1502},
        census={"retired": 200},
        quarantine=Lines(12, 3456, False),
        mixture=(MixedSource("web", 0.75, 0.5, 2, False), MixedSource("code", 0.25, 0.5, 2, False)),
        problems=("something",),
    )
    assert json.loads(json.dumps(status_values(outlook(looked)))) == {
        "schema": 1,
        "directory": "/data/stream",
        "looked_at_s": NOW,
        "error": None,
        "summary": "the producer waits: for rows",
        "kind": "native",
        "stream_id": ID,
        "samples_per_chunk": 10,
        "ended": False,
        "published_chunks": 1234,
        "published_samples": 12_340,
        "retired_chunks": 200,
        "retired_samples": 2000,
        "present_chunks": 1034,
        "published_chunks_per_s": 5.0,
        "published_samples_per_s": 50.0,
        "used_bytes": 12_340_000,
        "used_bytes_is_exact": True,
        "free_bytes": 2_000_000_000,
        "growth_bytes_per_s": None,
        "full_in_s": None,
        "quarantined_rows": 12,
        "quarantined_rows_is_exact": False,
        "quarantine_bytes": 3456,
        "mixture": [
            {"name": "web", "weight": 0.75, "share": 0.5, "drawn_rows": 2, "finished": False},
            {"name": "code", "weight": 0.25, "share": 0.5, "drawn_rows": 2, "finished": False},
        ],
        "band": {
            "stop_chunk": 1234,
            "stretches": [
                {"first_chunk": 0, "stop_chunk": 200, "state": "deleted"},
                {"first_chunk": 200, "stop_chunk": 1100, "state": "done"},
                {"first_chunk": 1100, "stop_chunk": 1168, "state": "taken"},
                {"first_chunk": 1168, "stop_chunk": 1170, "state": "reading"},
                {"first_chunk": 1170, "stop_chunk": 1234, "state": "ready"},
            ],
            "close_up": [
                {
                    "chunk": chunk,
                    "state": "taken" if chunk < 1168 else "reading" if chunk < 1170 else "ready",
                    "readers": [{"consumer": "sft", "rank": chunk % 2}] if 1168 <= chunk < 1170 else [],
                }
                for chunk in range(1138, 1234)
            ],
        },
        "producer": {
            "state": "waiting",
            "said_state": "waiting",
            "host": "node7",
            "pid": 12345,
            "process_is_gone": None,
            "process_has_ended": False,
            "heartbeat_age_s": 2.0,
            "waits_for": "for rows",
            "failure": None,
        },
        "consumers": [
            {
                "name": "sft",
                "ranks": 2,
                "consumed_samples": 11_000,
                "chunks_before": 1100,
                "checkpoint_age_s": 4.0,
                "lag_chunks": 134,
                "lag_samples": 1340,
                "lag_s": 1502.0,
                "needs_chunks": 1170,
                "window_first_chunk": 1168,
                "window_stop_chunk": 1170,
                "reading_age_s": 4.0,
                "ahead_chunks": 64,
                "ahead_samples": 640,
                "read_chunks_per_s": None,
                "read_samples_per_s": None,
                "blend": [],
                "supply": "unknown",
                "starving_in_s": None,
                "problem": None,
            }
        ],
        "problems": ["something"],
    }


def test_json_of_a_producer_that_has_failed() -> None:
    for note, failure in (("no object", "no object"), ("", None)):
        producer = status_values(outlook(survey(head=state("failed", note))))["producer"]
        assert (producer["waits_for"], producer["failure"]) == (None, failure)


def test_json_has_the_same_fields_whatever_is_known() -> None:
    full = status_values(outlook(survey(consumers=(consumer(consumed=1, needs=1),))))
    foreign = {"manifest": None, "native": False, "samples": None}
    bare = status_values(outlook(survey(head=None, census=foreign, free=None, consumers=(consumer(problem="torn"),))))
    assert full.keys() == bare.keys()
    assert full["consumers"][0].keys() == bare["consumers"][0].keys()
    assert (bare["kind"], bare["producer"], bare["published_samples"], bare["retired_samples"]) == (
        "foreign",
        None,
        None,
        None,
    )
    assert (bare["quarantined_rows"], bare["quarantine_bytes"], bare["quarantined_rows_is_exact"]) == (0, 0, True)


def test_every_json_field_is_documented() -> None:
    text = (Path(__file__).parents[2] / "docs" / "status.md").read_text(encoding="utf-8")
    values = status_values(outlook(survey(consumers=(consumer(consumed=1, needs=1),))))
    fields = {*values, *values["producer"], *values["consumers"][0], *values["band"], *values["band"]["close_up"][0]}
    fields |= {*status_values(outlook(survey(mixture=(MixedSource("web", 1.0, None, 0, False),))))["mixture"][0]}
    assert {field for field in fields if f"| `{field}` |" not in text} == set()


def test_json_of_a_look_that_has_failed() -> None:
    assert failure_values(Path("/data"), NOW, "no stream") == {
        "schema": 1,
        "directory": "/data",
        "looked_at_s": NOW,
        "error": "no stream",
    }
