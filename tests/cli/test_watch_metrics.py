"""What `lazyshard watch` says to Prometheus, and that the Grafana dashboard asks for nothing else."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import pytest
from prometheus_client.parser import text_string_to_metric_families

from lazyshard.cli.watch_server import MAX_LABELS, LastLook, metrics_page
from lazyshard.format.seal import MixedSource
from lazyshard.format.state import BlendShare
from lazyshard.inspection.outlook import Outlook
from lazyshard_producer.display import Metrics
from tests.cli.commands import HEAD, NOW, consumer, outlook, survey, told
from tests.producer.display.test_display import scrape

ROOT: Final = Path(__file__).resolve().parents[2]
DASHBOARD: Final = ROOT / "producer" / "deploy" / "grafana" / "lazyshard.json"

MIXTURE = (MixedSource("web", 0.75, 0.5, 2, False), MixedSource("b\nooks", 0.25, None, 0, False))


def page(found: Outlook | None, **values: Any) -> str:
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
    one = told(consumed=1200, done=120, needs=320, at=NOW + 6)
    assert one.cursor is not None
    blend = (BlendShare("/a", 0.8, 300), BlendShare("/b", 0.2, 100))
    blended = replace(one, cursor=replace(one.cursor, blend=blend))
    unread = {"sft": NOW - 5}
    return outlook(first, survey(consumers=(blended,), looked_at=NOW + 7, unread_since=unread, mixture=MIXTURE))


def test_all_facts_are_told_and_documented() -> None:
    found = samples(page(everything()))
    names = {name.split()[0] for name in found}
    assert found.pop("lazyshard_stream_full_in_seconds") == pytest.approx(2e9 / 5e4)
    assert found.pop("lazyshard_consumer_starving_in_seconds sft") == pytest.approx((1234 - 320) / (12 - 5))
    text = (ROOT / "docs" / "watch.md").read_text(encoding="utf-8")
    assert {name for name in names if f"`{name}`" not in text and f"`{name}{{" not in text} == set()
    assert found == {
        "lazyshard_stream_up": 1,
        "lazyshard_stream_last_look_seconds": NOW,
        "lazyshard_stream_silent_seconds": 0,
        "lazyshard_stream_published_chunks": 1234,
        "lazyshard_stream_published_samples": 12_340,
        "lazyshard_stream_retired_chunks": 0,
        "lazyshard_stream_ended": 0,
        "lazyshard_stream_published_samples_per_second": 50,
        "lazyshard_stream_used_bytes": 12_340_000,
        "lazyshard_stream_free_bytes": 2e9,
        "lazyshard_stream_growth_bytes_per_second": 50_000,
        "lazyshard_stream_quarantined_rows": 0,
        "lazyshard_stream_problems": 0,
        "lazyshard_stream_consumers": 1,
        "lazyshard_stream_heartbeat_age_seconds": 9,
        **{
            f"lazyshard_stream_producer_state {state}": state == "running"
            for state in ("running", "waiting", "idle", "finished", "failed", "dead")
        },
        "lazyshard_stream_source_weight web": 0.75,
        "lazyshard_stream_source_weight b\\nooks": 0.25,
        "lazyshard_stream_source_share web": 0.5,
        "lazyshard_consumer_consumed_samples sft": 1200,
        "lazyshard_consumer_checkpoint_age_seconds sft": 1,
        "lazyshard_consumer_lag_chunks sft": 1114,
        "lazyshard_consumer_lag_samples sft": 11_140,
        "lazyshard_consumer_lag_seconds sft": 12,
        "lazyshard_consumer_ahead_chunks sft": 914,
        "lazyshard_consumer_read_samples_per_second sft": 120,
        "lazyshard_consumer_waiting sft": 0,
        "lazyshard_consumer_blend_weight sft /a": 0.8,
        "lazyshard_consumer_blend_weight sft /b": 0.2,
        "lazyshard_consumer_blend_share sft /a": 0.75,
        "lazyshard_consumer_blend_share sft /b": 0.25,
        "lazyshard_consumer_problem sft": 0,
    }


def test_what_is_not_known_has_no_sample() -> None:
    census = {"manifest": None, "native": False, "samples": None}
    found = samples(page(outlook(survey(head=None, census=census, free=None, consumers=(consumer(problem="x"),)))))
    known = {name.removeprefix("lazyshard_consumer_") for name in found if name.startswith("lazyshard_consumer_")}
    assert (found["lazyshard_consumer_problem sft"], known) == (1, {"problem sft", "waiting sft"})
    for name in ("published_samples", "free_bytes", "full_in_seconds", "heartbeat_age_seconds"):
        assert f"lazyshard_stream_{name}" not in found
    one = told(needs=4)
    assert one.cursor is not None
    begun = replace(one, cursor=replace(one.cursor, blend=(BlendShare("/a", 1.0, 0),)))
    names = [name for name in samples(page(outlook(survey(consumers=(begun,))))) if "blend" in name]
    assert names == ["lazyshard_consumer_blend_weight sft /a"]


def test_what_was_true_a_while_ago_is_not_told() -> None:
    failed = {"lazyshard_stream_up": 0, "lazyshard_stream_silent_seconds": 0}
    last = {"lazyshard_stream_last_look_seconds": NOW}
    assert samples(page(everything(), error="no stream")) == failed | last
    silent = samples(page(everything(), silent_since=NOW - 20))
    assert silent == failed | last | {"lazyshard_stream_silent_seconds": 30}
    # Before the first look; and of a dead producer.
    assert samples(page(None, answered_at=None)) == failed
    dead = outlook(survey(head=replace(HEAD, updated_at=NOW - 100)))
    assert samples(page(dead))["lazyshard_stream_producer_state dead"] == 1


def test_of_many_consumers_those_furthest_behind_have_their_own() -> None:
    many = tuple(consumer(f"c{number:03}", consumed=number * 10, done=number) for number in range(MAX_LABELS + 5))
    found = samples(page(outlook(survey(consumers=many))))
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
    own = {name.split()[0] for name in samples(page(everything()))}
    asked = expressions(json.loads(DASHBOARD.read_text(encoding="utf-8")))
    names = {name for text in asked for name in re.findall(r"\blazyshard_[a-z_]+", text)}
    assert len(names) > 20
    assert names - producers - own == set(), "the dashboard asks for what nobody exports"
    unseen = {"stream_consumers", "stream_last_look_seconds", "consumer_blend_weight", "consumer_blend_share"}
    assert own - names == {f"lazyshard_{name}" for name in unseen}, "metrics of no panel"
