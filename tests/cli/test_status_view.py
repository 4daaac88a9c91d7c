"""What `lazyshard status` says of looks that are made up: pages, the band, JSON; what `watch` tells Prometheus."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import pytest
from prometheus_client.parser import text_string_to_metric_families

from lazyshard.cli.status import SIGNS, band_line, problems, status_lines, status_values, summary
from lazyshard.cli.watch_server import MAX_LABELS, LastLook, metrics_page
from lazyshard.format.records import Head, ProducerState
from lazyshard.format.seal import MixedSource
from lazyshard.format.state import BlendShare, Cursor, RunState
from lazyshard.inspection.outlook import Band, ChunkState, ChunkStretch, Outlook
from lazyshard.inspection.survey import DiskUse, Lines, Survey
from lazyshard.part import Part
from lazyshard.stream.cursor import Consumer
from lazyshard_producer.display import Metrics
from tests.cli.commands import HEAD, ID, NOW, blended, consumer, outlook, survey, told
from tests.harness.processes.environment import ROOT
from tests.producer.display.test_display import scrape

DASHBOARD: Final = ROOT / "producer" / "deploy" / "grafana" / "lazyshard.json"
FOREIGN: dict[str, Any] = {"manifest": None, "native": False, "samples": None}
MIXED = (MixedSource("web", 0.75, 0.5, 2, False), MixedSource("b\nooks", 0.25, None, 0, False))


def state(name: ProducerState, note: str = "", age: float = 2.0) -> Head:
    return replace(HEAD, state=name, note=note, updated_at=NOW - age)


FINISHED = replace(state("finished"), ended=True)


def stepping(name: str, consumed: int, done: int) -> Consumer:
    cursor = Cursor(name, ID, consumed, done, {"dp_size": 2, "batch_size": 2}, NOW)
    return Consumer(name, cursor, None, None)


def limited(name: str, consumed: int, done: int) -> Consumer:
    """A consumer of one rank that takes so many samples for all, and has had them."""
    state = RunState(ID, 10, 10, 0, 0, consumed, (Part(1, 1, consumed),), consumed)
    return Consumer(name, Cursor(name, ID, consumed, done, {}, NOW, state), None, None)


def page(*looks: Survey, watching: bool = False, width: int = 80) -> list[str]:
    return status_lines(outlook(*looks), watching=watching, width=width)


def facts(lines: list[str], label: str) -> list[str]:
    return [line[14:] for line in lines if line[:14].strip() == label]


def test_page_of_one_look() -> None:
    readers = (consumer("eval", needs=1236), consumer("sft", consumed=11_000, done=1100, needs=1170, at=NOW - 723))
    looked = survey(
        consumers=readers,
        unread_since={"sft": NOW - 1502},
        census={"retired": 200},
        disk=DiskUse(10_340_000_000, False, 1e7, ()),
        quarantine=Lines(12, 3456, True),
    )
    shown = page(looked)
    assert shown[:2] == ["/data/stream", "the producer is running; waiting for data: 'eval' for chunk 1,235"]
    assert "disk          about 10.3 GB used, 2.0 GB free" in shown
    expected = {
        "process": ["12345 on node7, heartbeat 2 s old"],
        "checkpoint": ["none yet", "11,000 samples, done with 1,100 chunks; 12 min 3 s old"],
        "lag": ["12,340 samples not in a checkpoint", "1,340 samples not in a checkpoint"],
        "keeps": ["1,234 chunks from deletion", "134 chunks from deletion, the oldest 25 min 2 s old"],
        "reading": [
            "needs 1,236 chunks, waits for chunk 1,235; 4 s old",
            "needs 1,170 chunks, 64 chunks ahead of it; 12 min 3 s old",
        ],
    }
    assert {label: facts(shown, label) for label in expected} == expected


WAITS = "64 chunks ahead of sft (limit --max-ahead 64)"
NOTE = "--min-free-disk 1.0 GB: 0.9 GB are free, the next chunk may take 10.0 kB; --retain all deletes nothing"
DEAD = "the producer is dead"
ENDED: dict[str, Any] = {"head": state("waiting", age=1), "ended": True}
DONE = (consumer("a", consumed=12_340, done=1234), stepping("b", 12_337, done=1234))
LEFT = (consumer("a", consumed=12_340, done=1234), stepping("b", 12_337, done=1232))
OLDER = (consumer("a", consumed=12_340, done=1213), stepping("b", 12_337, done=1232))


@pytest.mark.parametrize(
    ("head", "consumers", "wanted"),
    [
        (HEAD, (consumer("a", needs=1231), consumer("b", needs=1233)), ["3 chunks ahead", "'a'"]),
        (HEAD, (consumer(needs=1234),), ["0 chunks ahead", "'sft'"]),
        (HEAD, (consumer(needs=1235),), ["running", "waiting for data", "'sft' for chunk 1,234"]),
        (HEAD, (consumer("a", needs=1), consumer("b", needs=1236)), ["running", "'b' for chunk 1,235"]),
        (HEAD, (), ["running", "no consumer"]),
        (HEAD, (consumer("a", 10, done=1), consumer("b", 20, done=2)), ["running", "'a'", "1,233 chunks"]),
        # One that has had all that it may take is behind for good.
        (HEAD, (consumer("a", 12_320, done=1232), limited("b", 500, done=50)), ["running", "'a'", "2 chunks"]),
        (HEAD, (limited("b", 500, done=50),), ["running", "'b'", "max_total_samples", "chunks 50 to 1,233"]),
        (HEAD, (stepping("b", 12_337, done=1232),), ["running", "'b'", "3 samples"]),
        (HEAD, (consumer(problem="torn"),), ["running"]),
        (state("waiting", WAITS), (consumer(needs=1170),), ["waits", WAITS]),
        (state("waiting", "new lines"), (consumer(needs=1235),), ["waits: new lines", "'sft' for chunk 1,234"]),
        (state("waiting"), (), ["waits", "no consumer"]),
        (state("idle", age=7200), (), ["stopped 2 h 0 min ago", "start it again", "no consumer"]),
        (state("failed"), (), ["failed 2 s ago", "log", "no consumer"]),
        (state("failed", "a.jsonl:7: no object"), (), ["failed 2 s ago: a.jsonl:7: no object", "no consumer"]),
        (state("running", age=125), (consumer(needs=1230),), [DEAD, "2 min 5 s", "start it again", "4 chunks ahead"]),
        (FINISHED, (), ["ended", "no consumer"]),
        (FINISHED, (DONE[0], consumer("b", 12_330, done=1233)), ["ended", "'b'", "1 chunk"]),
        (FINISHED, DONE, ["ended", "every consumer is done"]),
        (FINISHED, LEFT, ["ended", "'b'", "3 samples"]),
        (FINISHED, OLDER, ["ended", "'a'", "chunks 1,213 to 1,233"]),
        # No process of it is left; what it needs before it is started again.
        ({"head": state("running", age=20), "gone": True}, (), [DEAD, "20 s", "process is gone", "start it again"]),
        (ENDED, (), [DEAD, "process has ended: start it again"]),
        (ENDED | {"free": 9_999}, (), [DEAD, "the disk is full, free some space"]),
        (ENDED | {"head": state("waiting", NOTE, age=1)}, (), [f"free some space, for which it waited ({NOTE})"]),
        (ENDED | {"head": state("waiting", f"deadlock: {NOTE}", age=1)}, (), ["free some space", "deadlock"]),
    ],
)
def test_summary(head: Head | dict[str, Any], consumers: tuple[Consumer, ...], wanted: list[str]) -> None:
    more = head if isinstance(head, dict) else {"head": head}
    text = summary(outlook(survey(consumers=consumers, **more)))
    assert [part for part in wanted if part not in text] == []
    assert isinstance(head, dict) or ("no consumer" in text) == ("no consumer" in wanted)


@pytest.mark.parametrize(
    ("values", "wanted"),
    [
        ({"problems": ("head.json: torn",)}, "head.json: torn"),
        (
            {"consumers": (consumer("a b", problem="cursors/a b.json: torn"),), "directory": Path("/my data")},
            "consumer 'a b': cursors/a b.json: torn; .*`lazyshard forget '/my data' 'a b'`",
        ),
        (
            {"consumers": (consumer(consumed=10, done=1), consumer("b", needs=1)), "census": {"retired": 2}},
            "consumer 'sft': .*only 1 chunk, .*2 are deleted",
        ),
        ({"head": state("running", age=-90)}, "clock is 1 min 30 s ahead"),
        ({"head": state("running", age=-4)}, None),
    ],
)
def test_problems(values: dict[str, Any], wanted: str | None) -> None:
    found = outlook(survey(**values))
    assert [bool(re.search(wanted or "", text)) for text in problems(found)] == [True] * (wanted is not None)
    lines = status_lines(found, watching=False)
    assert sum(line.startswith("problem ") for line in lines) == (wanted is not None)


def band(*stretches: tuple[int, ChunkState]) -> Band:
    first, made = 0, []
    for stop, name in stretches:
        made.append(ChunkStretch(first, stop, name))
        first = stop
    return Band(first, tuple(made), (), {})


SHORT = band((2, "deleted"), (3, "done"), (4, "taken"), (6, "reading"), (8, "ready"), (9, "awaited"))
LONG = band((400_000, "done"), (400_001, "reading"), (1_000_000, "ready"))


@pytest.mark.parametrize(
    ("shown", "width", "line"),
    [
        # A chunk is a character while there is room, and what is read is seen in the longest stream.
        (SHORT, 60, "..-=##++?"),
        (LONG, 10, "----#+++++"),
        (band(), 66, ""),
        *[(band((1000, name)), width, SIGNS[name] * width) for name in SIGNS for width in (1, 7, 66)],
    ],
)
def test_band(shown: Band, width: int, line: str) -> None:
    assert band_line(shown, width) == line


def test_window_mixture_and_blend_on_the_page() -> None:
    mixture = (MixedSource("web", 0.7, 0.6994, 1399, False), MixedSource("a\nb", 0.0, 0.5, 1, True))
    shares = BlendShare("/data/a", 0.5, 100), BlendShare("/data/a\nb", 0.5, 300)
    one = blended(told(consumed=11_640, done=1164, needs=1170, ranks=3), *shares)
    looked = survey(consumers=(one,), mixture=(*mixture, MixedSource("code", 0.3, None, 0, False)))
    text = "\n".join(page(looked, watching=True))
    for fact in (
        "web: 69.9%, 1,399 rows; weight 70.0%",
        "a\\nb: 50.0%, 1 row; finished",
        "code: none yet; weight 30.0%",
        "/data/a: 25.0%, 100 samples; weight 50.0%",
        "/data/a\\nb: 75.0%, 300 samples; weight 50.0%",
    ):
        assert text.count(fact) == 1, fact
    assert "  reads now   chunks 1,167 to 1,169 (rank 0: 1,167;" in text
    assert "# read now, + ready" in text and "# read now" not in "\n".join(page(looked))
    (values,) = status_values(outlook(looked))["consumers"]
    assert values["blend"] == [
        {"stream": "/data/a", "weight": 0.5, "share": 0.25, "consumed_samples": 100},
        {"stream": "/data/a\nb", "weight": 0.5, "share": 0.75, "consumed_samples": 300},
    ]
    waiting = page(survey(consumers=(told(consumed=12_330, done=1233, needs=1236, ranks=3),)), watching=True)
    assert facts(waiting, "waits for")[0].startswith("chunk 1,235, to read chunks 1,233 to 1,235 ")
    assert facts(waiting, "reads now") == []


JSON = r"""
{"schema": 1, "directory": "/data/stream", "looked_at_s": 1700000000.0, "error": null,
 "summary": "the producer waits: for rows", "kind": "native", "stream_id": "00000000000000000000000000000000",
 "samples_per_chunk": 10, "ended": false, "published_chunks": 1234, "published_samples": 12340,
 "retired_chunks": 200, "retired_samples": 2000, "present_chunks": 1034,
 "published_chunks_per_s": 5.0, "published_samples_per_s": 50.0,
 "used_bytes": 12340000, "used_bytes_is_exact": true, "free_bytes": 2000000000,
 "growth_bytes_per_s": null, "full_in_s": null,
 "quarantined_rows": 12, "quarantined_rows_is_exact": false, "quarantine_bytes": 3456,
 "mixture": [
  {"name": "web", "weight": 0.75, "share": 0.5, "drawn_rows": 2, "finished": false},
  {"name": "code", "weight": 0.25, "share": 0.5, "drawn_rows": 2, "finished": false}],
 "band": {"stop_chunk": 1234, "stretches": [
  {"first_chunk": 0, "stop_chunk": 200, "state": "deleted"},
  {"first_chunk": 200, "stop_chunk": 1100, "state": "done"},
  {"first_chunk": 1100, "stop_chunk": 1168, "state": "taken"},
  {"first_chunk": 1168, "stop_chunk": 1170, "state": "reading"},
  {"first_chunk": 1170, "stop_chunk": 1234, "state": "ready"}]},
 "producer": {"state": "waiting", "said_state": "waiting", "host": "node7", "pid": 12345, "process_is_gone": null,
  "process_has_ended": false, "heartbeat_age_s": 2.0, "waits_for": "for rows", "failure": null},
 "sequencer": null, "writers": [], "consumers": [
  {"name": "sft", "ranks": 2, "consumed_samples": 11000, "chunks_before": 1100, "checkpoint_age_s": 4.0,
   "lag_chunks": 134, "lag_samples": 1340, "lag_s": 1502.0, "needs_chunks": 1170,
   "window_first_chunk": 1168, "window_stop_chunk": 1170, "reading_age_s": 4.0, "ahead_chunks": 64,
   "ahead_samples": 640, "read_chunks_per_s": null, "read_samples_per_s": null, "blend": [], "supply": "unknown",
   "starving_in_s": null, "problem": null}],
 "problems": ["something"]}
"""


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
    found = json.loads(json.dumps(status_values(outlook(looked))))
    cells = found["band"].pop("close_up")
    assert found == json.loads(JSON)
    assert [cell["chunk"] for cell in cells] == list(range(1138, 1234))
    assert [(cell["chunk"], cell["readers"]) for cell in cells if cell["state"] == "reading"] == [
        (chunk, [{"consumer": "sft", "rank": chunk % 2}]) for chunk in (1168, 1169)
    ]


def test_json_has_the_same_fields_whatever_is_known_and_all_are_documented() -> None:
    full = status_values(outlook(survey(consumers=(consumer(consumed=1, needs=1),))))
    bare = status_values(outlook(survey(head=None, census=FOREIGN, free=None, consumers=(consumer(problem="torn"),))))
    failed = [status_values(outlook(survey(head=state("failed", note))))["producer"] for note in ("no object", "")]
    assert [(one["waits_for"], one["failure"]) for one in failed] == [(None, "no object"), (None, None)]
    assert full.keys() == bare.keys()
    assert full["consumers"][0].keys() == bare["consumers"][0].keys()
    text = (ROOT / "docs" / "status.md").read_text(encoding="utf-8")
    mixed = status_values(outlook(survey(mixture=(MixedSource("web", 1.0, None, 0, False),))))["mixture"][0]
    parts = (full, full["producer"], full["consumers"][0], full["band"], full["band"]["close_up"][0], mixed)
    documented = re.findall(r"`(\w+)`(?=[^|\n]* \| (?:string|integer|number|boolean|array|object))", text)
    assert {field for part in parts for field in part} - set(documented) == set()
    assert facts(page(survey(head=None, census=FOREIGN, free=None)), "disk") == ["12.3 MB used"]
    unknown = [bare[name] for name in ("producer", "published_samples", "retired_samples")]
    assert (bare["kind"], unknown) == ("foreign", [None] * 3)
    assert (bare["quarantined_rows"], bare["quarantine_bytes"], bare["quarantined_rows_is_exact"]) == (0, 0, True)


def exposed(found: Outlook | None, **values: Any) -> str:
    facts = LastLook(found, values.get("error"), values.get("answered_at", NOW), values.get("silent_since"))
    return metrics_page(facts, NOW + 10).decode()


def samples(text: str) -> dict[str, float]:
    found = {}
    for family in text_string_to_metric_families(text):
        for one in family.samples:
            assert (one.name, str(one.labels)) not in found, "a series that is there twice"
            found[" ".join([one.name, *one.labels.values()])] = one.value
    return found


def everything() -> Outlook:
    first = survey(consumers=(told(consumed=1000, done=100, needs=200),))
    shares = BlendShare("/a", 0.8, 300), BlendShare("/b", 0.2, 100)
    one = blended(told(consumed=1200, done=120, needs=320, at=NOW + 6), *shares)
    unread = {"sft": NOW - 5}
    return outlook(first, survey(consumers=(one,), looked_at=NOW + 7, unread_since=unread, mixture=MIXED))


def test_all_facts_are_told_and_documented() -> None:
    found = samples(exposed(everything()))
    names = {name.split()[0] for name in found}
    assert found.pop("lazyshard_stream_full_in_seconds") == pytest.approx(2e9 / 5e4)
    assert found.pop("lazyshard_consumer_starving_in_seconds sft") == pytest.approx((1234 - 320) / (12 - 5))
    text = (ROOT / "docs" / "watch.md").read_text(encoding="utf-8")
    assert {name for name in names if f"`{name}`" not in text and f"`{name}{{" not in text} == set()
    states = ("running", "waiting", "idle", "finished", "failed", "dead")
    of_stream = {
        **{"up": 1, "last_look_seconds": NOW, "silent_seconds": 0, "ended": 0, "problems": 0, "consumers": 1},
        **{"published_chunks": 1234, "published_samples": 12_340, "retired_chunks": 0, "quarantined_rows": 0},
        **{"published_samples_per_second": 50, "heartbeat_age_seconds": 9},
        **{"used_bytes": 12_340_000, "free_bytes": 2e9, "growth_bytes_per_second": 50_000},
        **{"source_weight web": 0.75, "source_weight b\\nooks": 0.25, "source_share web": 0.5},
        **{f"producer_state {state}": state == "running" for state in states},
    }
    of_consumer = {
        **{"consumed_samples sft": 1200, "checkpoint_age_seconds sft": 1, "waiting sft": 0, "problem sft": 0},
        **{"lag_chunks sft": 1114, "lag_samples sft": 11_140, "lag_seconds sft": 12},
        **{"ahead_chunks sft": 914, "read_samples_per_second sft": 120},
        **{"blend_weight sft /a": 0.8, "blend_weight sft /b": 0.2},
        **{"blend_share sft /a": 0.75, "blend_share sft /b": 0.25},
    }
    expected = {f"lazyshard_stream_{name}": value for name, value in of_stream.items()}
    assert found == expected | {f"lazyshard_consumer_{name}": value for name, value in of_consumer.items()}


def test_what_is_not_known_has_no_sample() -> None:
    found = samples(exposed(outlook(survey(head=None, census=FOREIGN, free=None, consumers=(consumer(problem="x"),)))))
    known = {name.removeprefix("lazyshard_consumer_") for name in found if name.startswith("lazyshard_consumer_")}
    assert (found["lazyshard_consumer_problem sft"], known) == (1, {"problem sft", "waiting sft"})
    for name in ("published_samples", "free_bytes", "full_in_seconds", "heartbeat_age_seconds"):
        assert f"lazyshard_stream_{name}" not in found
    begun = blended(told(needs=4), BlendShare("/a", 1.0, 0))
    names = [name for name in samples(exposed(outlook(survey(consumers=(begun,))))) if "blend" in name]
    assert names == ["lazyshard_consumer_blend_weight sft /a"]


def test_what_was_true_a_while_ago_is_not_told() -> None:
    failed = {"lazyshard_stream_up": 0, "lazyshard_stream_silent_seconds": 0}
    last = {"lazyshard_stream_last_look_seconds": NOW}
    assert samples(exposed(everything(), error="no stream")) == failed | last
    silent = samples(exposed(everything(), silent_since=NOW - 20))
    assert silent == failed | last | {"lazyshard_stream_silent_seconds": 30}
    # Before the first look; and of a dead producer.
    assert samples(exposed(None, answered_at=None)) == failed
    dead = outlook(survey(head=replace(HEAD, updated_at=NOW - 100)))
    assert samples(exposed(dead))["lazyshard_stream_producer_state dead"] == 1


def test_of_many_consumers_those_furthest_behind_have_their_own() -> None:
    many = tuple(consumer(f"c{number:03}", consumed=number * 10, done=number) for number in range(MAX_LABELS + 5))
    found = samples(exposed(outlook(survey(consumers=many))))
    lags = {name: lag for name, lag in found.items() if name.startswith("lazyshard_consumer_lag_chunks")}
    assert (len(lags), max(lags.values()), min(lags.values())) == (MAX_LABELS, 1234, 1234 - MAX_LABELS + 1)
    assert found["lazyshard_stream_consumers"] == MAX_LABELS + 5


def expressions(value: Any) -> list[str]:
    """What the dashboard asks of Prometheus: all `expr` and queries of variables."""
    if isinstance(value, dict):
        own = [value[name] for name in ("expr", "query", "definition") if isinstance(value.get(name), str)]
        return own + [text for one in value.values() for text in expressions(one)]
    return [text for one in value for text in expressions(one)] if isinstance(value, list) else []


def test_dashboard_asks_for_metrics_that_there_are() -> None:
    metrics = Metrics("127.0.0.1", 0)
    try:
        metrics.taken("a", 1)
        metrics.consumers({"sft": 1}, 1)
        producers = {f"lazyshard_producer_{name.partition('{')[0]}" for name in scrape(metrics)}
    finally:
        metrics.close()
    own = {name.split()[0] for name in samples(exposed(everything()))}
    asked = expressions(json.loads(DASHBOARD.read_text(encoding="utf-8")))
    names = {name for text in asked for name in re.findall(r"\blazyshard_[a-z_]+", text)}
    assert len(names) > 20
    assert names - producers - own == set(), "the dashboard asks for what nobody exports"
    unseen = {"stream_consumers", "stream_last_look_seconds", "consumer_blend_weight", "consumer_blend_share"}
    assert own - names == {f"lazyshard_{name}" for name in unseen}, "metrics of no panel"
