"""docs/producer.md names what there is, and what it shows is so."""

import re
from pathlib import Path

import pytest

from lazyshard_producer.configuration.config import TABLES, read_config
from lazyshard_producer.configuration.settings import OPTIONS, SOURCE_OPTIONS
from lazyshard_producer.display.metrics import PrometheusMetrics
from tests.harness.processes.environment import ROOT
from tests.producer.display.test_metrics import scrape

DOCS = (ROOT / "docs" / "producer.md").read_text("utf-8")


@pytest.mark.parametrize("flag", ["--source", "--follow", *(option.flag for option in (*SOURCE_OPTIONS, *OPTIONS))])
def test_every_option_is_named(flag: str) -> None:
    assert re.search(rf"`{flag}[ `]|{flag} ", DOCS)


def test_the_configuration_file_that_is_shown_has_known_keys_only(tmp_path: Path) -> None:
    (block,) = re.findall(r"^```toml\n(.*?)^```$", DOCS, re.MULTILINE | re.DOTALL)
    path = tmp_path / "run.toml"
    path.write_text(block)
    file = read_config(str(path))
    assert file.problems == ()
    assert len(file.sources) == 2
    for table in TABLES:
        (comment,) = re.findall(rf"^\[{table}\] +# (.*)$", block, re.MULTILINE)
        assert sorted(comment.split(", ")) == sorted(option.name for option in OPTIONS if option.about.table == table)


def test_the_metrics_that_are_named_are_those_that_are_served() -> None:
    metrics = PrometheusMetrics("127.0.0.1", 0)
    try:
        metrics.taken("a", 1)
        metrics.consumers({"train": 1}, 1)
        served = {re.sub(r"(_bucket|_sum|_count)?(\{.*)?$", "", name) for name in scrape(metrics)}
    finally:
        metrics.close()
    table = DOCS[DOCS.index("| metric, without") :]
    rows = re.findall(r"^\| (`.*?) \|", table, re.MULTILINE)
    named = {re.sub(r"\{.*", "", name) for row in rows for name in re.findall(r"`(.*?)`", row)}
    assert named == served
