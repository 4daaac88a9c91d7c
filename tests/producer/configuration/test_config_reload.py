"""SIGHUP: what may change while it runs, and what is refused."""

import signal
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import pytest

from lazyshard_producer.configuration.settings import Amount, Limits, Settings
from lazyshard_producer.errors import SettingInvalid
from lazyshard_producer.loop import reload_settings
from tests.harness.processes.commands import Commands
from tests.harness.processes.producing import head, ids, plain_sources, rows
from tests.producer.commands import Running

OLD: Final = Settings(sources=plain_sources(["a"]), out="out", samples_per_chunk=10, on_bad_row="skip", max_bad_rows=5)
CHANGING: Final[dict[str, Any]] = {"rate": 3.0, "max_bad_rows": 7, "limits": Limits(max_disk=10**9), "log_every_s": 5.0}
CALLED: Final = {"sources": "source", "store_patience_s": "store_patience_seconds"}


class Teller:
    def __init__(self) -> None:
        self.notes: list[str] = []
        self.warnings: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)

    def warn(self, text: str) -> None:
        self.warnings.append(text)


def reloaded(new: Settings) -> tuple[Settings, list[str]]:
    """The settings to continue with, and the names of those that may not change."""
    teller: Any = Teller()
    settings = reload_settings(OLD, lambda: new, teller)
    return settings, [text.partition(" cannot change ")[0] for text in teller.warnings]


def test_what_may_change() -> None:
    new = replace(OLD, **CHANGING)
    assert reloaded(new) == (new, [])


@pytest.mark.parametrize("name", [one.name for one in fields(Settings) if one.name not in CHANGING])
def test_what_may_not_change(name: str) -> None:
    # What may change does beside it.
    other: Any = "other"
    new = replace(OLD, rate=3.0, **{name: other})
    assert reloaded(new) == (replace(OLD, rate=3.0), [CALLED.get(name, name)])


@pytest.mark.parametrize("policy", ["fail", "quarantine"])
def test_the_cap_on_bad_rows_stays_where_the_policy_would_change(policy: Any) -> None:
    new = replace(OLD, on_bad_row=policy, max_bad_rows=None)
    assert reloaded(new) == (OLD, ["on_bad_row"])


def test_changes_are_told() -> None:
    teller: Any = Teller()
    ahead = Limits(max_ahead=Amount(number=64, unit="chunks"), max_disk=10**9, consumers=("train",))
    new = replace(OLD, rate=2.5, limits=ahead, log_every_s=5.0, out="other")
    assert reload_settings(OLD, lambda: new, teller) == replace(new, out="out")
    (warning,), (note,) = teller.warnings, teller.notes
    assert warning.startswith("out ")
    assert note.partition(": ")[2].split(", ") == [
        "rate from none to 2.5",
        "log_every_seconds from 60.0 to 5.0",
        "max_ahead from none to 64 chunks",
        "max_disk from none to 1.0 GB",
        "consumers from none to train",
    ]


def test_what_changes_nothing() -> None:
    def fail(error: Exception) -> Settings:
        raise error

    teller: Any = Teller()
    assert reload_settings(OLD, lambda: OLD, teller) == OLD
    assert (len(teller.notes), teller.warnings) == (1, [])
    for error in (SettingInvalid("run.toml: no TOML"), OSError(5, "Input/output error")):
        load = partial(fail, error)
        assert reload_settings(OLD, load, teller) is OLD
        assert str(error) in teller.warnings[-1]
    assert len(teller.notes) == 1


def test_a_run_takes_its_new_rate(nursery: Commands, tmp_path: Path) -> None:
    source, out, config = tmp_path / "a.jsonl", tmp_path / "out", tmp_path / "run.toml"
    source.write_bytes(rows(0, 100))
    text = f'out = "{out}"\nsamples_per_chunk = 10\nrate = RATE\n[[source]]\npath = "{source}"\n'
    config.write_text(text.replace("RATE", "0.001"))
    with Running(nursery, "run", "--config", config) as run:
        # In the middle of a wait of 1,000 seconds.
        run.wait_until(lambda: head(out).get("state") == "waiting")
        config.write_text("rate = fast")
        run.send(signal.SIGHUP)
        config.write_text(text.replace("RATE", "100000"))
        status, err = run.end(signal.SIGHUP)
    assert status == 0, err
    assert ids(out) == list(range(100))
    assert "rate from 0.001 to 100000.0" in err
