"""SIGHUP: what may change while a run goes on, and what is refused."""

import signal
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from lazyshard_producer.configuration.assembly import Reload, reloaded
from lazyshard_producer.configuration.quantities import Amount
from lazyshard_producer.configuration.settings import Limits, Settings
from lazyshard_producer.errors import SettingInvalid
from tests.harness.processes.producing import ids, plain_sources, rows, start, wait_until

OLD = Settings(sources=plain_sources(["a"]), out="out", samples_per_chunk=10, on_bad_row="skip", max_bad_rows=5)

OTHER: dict[str, Any] = {
    "sources": plain_sources(["b"]),
    "out": "other",
    "samples_per_chunk": 11,
    "measure": "m:f",
    "rate": 3.0,
    "max_row_bytes": 99,
    "transform": "m:f",
    "columns": (("a", "b"),),
    "where": "m:g",
    "encode": "m:e",
    "shuffle": 3,
    "seed": 3,
    "balance": 2,
    "pack": 8192,
    "split": 4096,
    "pad": 4096,
    "on_bad_row": "quarantine",
    "max_bad_rows": 7,
    "limits": Limits(max_disk=10**9),
    "metrics_port": 1,
    "metrics_host": "::1",
    "log_every_s": 5.0,
    "max_spool": 1 << 20,
    "store_patience_s": 5.0,
}

OF_BALANCE: dict[str, Any] = {
    "micro_batch_size": 5,
    "length_field": "tokens",
    "cost_per_token": 2.0,
    "cost_per_token_squared": 0.5,
}

OF_SPLIT: dict[str, Any] = {
    "split_bos": 1,
    "split_eos": 2,
    "split_every_bos": 1,
    "split_every_eos": 2,
    "split_overlap": 1,
}

OF_SWIFT = ("model", "template", "max_length", "encode_option")

CALLED = {"sources": "source", "store_patience_s": "store_patience_seconds"}


class Teller:
    def __init__(self) -> None:
        self.notes: list[str] = []
        self.warnings: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)

    def warn(self, text: str) -> None:
        self.warnings.append(text)


@pytest.mark.parametrize("name", ["rate", "limits", "log_every_s", "max_bad_rows"])
def test_what_may_change(name: str) -> None:
    new = replace(OLD, **{name: OTHER[name]})
    assert reloaded(OLD, new) == (new, [])


@pytest.mark.parametrize("name", sorted(set(OTHER) - {"rate", "limits", "log_every_s", "max_bad_rows"}))
def test_what_may_not_change(name: str) -> None:
    new = replace(OLD, **{name: OTHER[name]})
    assert reloaded(OLD, new) == (OLD, [CALLED.get(name, name)])


@pytest.mark.parametrize("name", sorted(OF_BALANCE))
def test_what_goes_with_balance_may_not_change(name: str) -> None:
    old = replace(OLD, balance=4)
    assert reloaded(old, replace(old, **{name: OF_BALANCE[name]})) == (old, [name])


@pytest.mark.parametrize("name", sorted(OF_SPLIT))
def test_how_rows_are_cut_may_not_change(name: str) -> None:
    old = replace(OLD, split=4096)
    assert reloaded(old, replace(old, **{name: OF_SPLIT[name]})) == (old, [name])


def test_with_what_rows_are_padded_may_not_change() -> None:
    old = replace(OLD, pad=4096)
    assert reloaded(old, replace(old, pad_token=1)) == (old, ["pad_token"])


def test_workers_may_not_change() -> None:
    old = replace(OLD, transform="m:f")
    assert reloaded(old, replace(old, workers=2)) == (old, ["workers"])


@pytest.mark.parametrize(
    ("name", "value"), [("length_field", "tokens"), ("pack_buffer", 100), ("pack_buffer_bytes", 100)]
)
def test_how_rows_are_packed_may_not_change(name: str, value: Any) -> None:
    old = replace(OLD, pack=8192)
    assert reloaded(old, replace(old, **{name: value})) == (old, [name])


def test_how_rows_are_encoded_may_not_change() -> None:
    old = replace(OLD, encode="swift", model="m")
    new = replace(OLD, encode="swift", model="n", template="t", max_length=3, encode_option=(("seed", "1"),))
    assert reloaded(old, new) == (old, list(OF_SWIFT))


def test_the_spool_may_not_change() -> None:
    old = replace(OLD, out="s3://bucket/a")
    assert reloaded(old, replace(old, spool="b")) == (old, ["spool"])


def test_what_a_tokenizer_measures_may_not_change() -> None:
    old = replace(OLD, measure="tokenizer")
    assert reloaded(old, replace(old, measure_field="text")) == (old, ["measure_field"])


def test_every_setting_is_decided_upon() -> None:
    others = {
        "workers",
        "spool",
        "pack_buffer",
        "pack_buffer_bytes",
        "pad_token",
        "measure_field",
        *OF_SPLIT,
        *OF_SWIFT,
    }
    assert {one.name for one in fields(Settings)} == OTHER.keys() | OF_BALANCE.keys() | others


def test_what_may_change_does_beside_what_may_not() -> None:
    settings, refused = reloaded(OLD, replace(OLD, rate=3.0, out="other", seed=3))
    assert settings == replace(OLD, rate=3.0)
    assert sorted(refused) == ["out", "seed"]


@pytest.mark.parametrize("policy", ["fail", "quarantine"])
def test_the_cap_on_bad_rows_stays_where_the_policy_would_change(policy: Any) -> None:
    new = replace(OLD, on_bad_row=policy, max_bad_rows=None)
    assert reloaded(OLD, new) == (OLD, ["on_bad_row"])


def test_changes_are_told() -> None:
    teller = Teller()
    ahead = Limits(max_ahead=Amount(number=64, unit="chunks"), max_disk=10**9, consumers=("train",))
    new = replace(OLD, rate=2.5, limits=ahead, log_every_s=5.0, out="other")
    assert Reload(lambda: new, "run.toml").take(OLD, teller) == replace(new, out="out")
    assert teller.warnings == ["run.toml: out cannot change while it runs; stop it and start it again for that"]
    assert teller.notes == [
        "reloaded run.toml: rate from none to 2.5, log_every_seconds from 60.0 to 5.0, max_ahead from none to "
        "64 chunks, max_disk from none to 1.0 GB, consumers from none to ('train',)"
    ]


def test_a_file_that_says_the_same_changes_nothing() -> None:
    teller = Teller()
    assert Reload(lambda: OLD, "run.toml").take(OLD, teller) == OLD
    assert (teller.notes, teller.warnings) == (["reloaded run.toml: nothing has changed"], [])


@pytest.mark.parametrize("error", [SettingInvalid("run.toml: no TOML"), OSError(5, "Input/output error")])
def test_a_file_that_cannot_be_taken_changes_nothing(error: Exception) -> None:
    def fail() -> Settings:
        raise error

    teller = Teller()
    assert Reload(fail, "run.toml").take(OLD, teller) is OLD
    assert (teller.notes, teller.warnings) == ([], [f"nothing is reloaded: {error}"])


def test_without_a_file_the_signal_is_told_and_ignored() -> None:
    teller = Teller()
    assert Reload(None, "None").take(OLD, teller) is OLD
    assert teller.notes == ["SIGHUP has come, and there is no configuration file to be read again: nothing changes"]


def head(out: Path) -> bytes:
    try:
        return (out / "head.json").read_bytes()
    except FileNotFoundError:
        return b""


def test_a_run_takes_its_new_rate(tmp_path: Path) -> None:
    source, out, config = tmp_path / "a.jsonl", tmp_path / "out", tmp_path / "run.toml"
    source.write_bytes(rows(0, 100))
    text = f'out = "{out}"\nsamples_per_chunk = 10\nrate = RATE\n[[source]]\npath = "{source}"\n'
    config.write_text(text.replace("RATE", "0.001"))
    process = start("run", "--config", config)
    try:
        # In the middle of a wait of 1,000 seconds.
        wait_until(lambda: b'"waiting"' in head(out), process)
        config.write_text("rate = fast")
        process.send_signal(signal.SIGHUP)
        config.write_text(text.replace("RATE", "100000"))
        process.send_signal(signal.SIGHUP)
        _, err = process.communicate(timeout=60)
    finally:
        with process:
            process.kill()
    assert process.returncode == 0, err
    assert ids(out) == list(range(100))
    assert "rate from 0.001 to 100000.0" in err
