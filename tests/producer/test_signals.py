"""Signals, to a run that works or waits: one line, an exit code, a stream that continues; SIGHUP: what may change."""

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import pytest

from lazyshard_producer.cli import main
from lazyshard_producer.configuration.settings import Amount, Limits, Settings
from lazyshard_producer.errors import SettingInvalid
from lazyshard_producer.loop import reload_settings
from lazyshard_producer.stop import Stop
from tests.cli.commands import python
from tests.harness.processes.commands import Commands
from tests.harness.processes.producing import head, ids, plain_sources, published, rows, run_arguments
from tests.producer.commands import Running
from tests.stream.streams import raising

ROWS = 300
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
SHUFFLED: Final = ("--shuffle", 5)
IN_WORKERS: Final = ("--transform", "tests.producer.recipes:same", "--workers", 1)
OLD: Final = Settings(sources=plain_sources(["a"]), out="out", samples_per_chunk=10, on_bad_row="skip", max_bad_rows=5)
CHANGING: Final = ("rate", "max_bad_rows", "limits", "log_every_s")
CALLED: Final = {"sources": "source", "store_patience_s": "store_patience_seconds"}


@pytest.fixture
def source(source: Path) -> Path:
    source.write_bytes(rows(0, ROWS))
    return source


@pytest.mark.parametrize(
    ("number", "code", "word", "rate"),
    [(signal.SIGINT, 130, "interrupted", 200), (signal.SIGTERM, 0, "terminated", 0.01)],
)
def test_a_signal_stops_between_rows(
    number: signal.Signals, code: int, word: str, rate: float, source: Path, nursery: Commands, out: Path
) -> None:
    with Running(nursery, *run_arguments(out, [source], 10, "--rate", rate)) as run:
        run.wait_until(lambda: published(out) >= (2 if rate > 1 else 0) and head(out) != {})
        sent = time.monotonic()
        status, err = run.end(number)
        assert (status, time.monotonic() - sent < 5) == (code, True)
    done = ids(out)
    assert done == list(range(len(done)))
    last = err.splitlines()[-1]
    assert f"event=end result={word}" in last
    assert f"published={len(done)} chunks={len(done) // 10}" in last
    assert (head(out)["state"], head(out)["ended"]) == ("idle", False)
    assert not (out / "stream.end").exists()
    assert not (out / ".tmp").exists()

    assert main(run_arguments(out, [source], 10)) == 0
    assert ids(out) == list(range(ROWS))


def test_the_second_signal_of_a_kind_ends_the_process_at_once() -> None:
    code = (
        "import os, signal; from lazyshard_producer.stop import Stop\n"
        "with Stop() as stop:\n"
        "    os.kill(os.getpid(), signal.SIGINT); print(stop.requested.name, flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGTERM); print(stop.requested.name, flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGINT); print('still here')"
    )
    done = python("-c", code)
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, "SIGINT\nSIGINT\n", "")


@pytest.fixture
def hangups() -> Iterator[None]:
    """Hangups as of a process that no nohup has started."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.usefixtures("hangups")
def test_the_handlers_of_before_are_put_back() -> None:
    before = list(map(signal.getsignal, SIGNALS))
    for released in (False, True):
        with Stop() as stop:
            assert all(signal.getsignal(number) is not old for number, old in zip(SIGNALS, before, strict=True))
            if released:
                stop.release()
                assert list(map(signal.getsignal, SIGNALS)) == before
        assert list(map(signal.getsignal, SIGNALS)) == before
        assert stop.requested is None


@pytest.mark.usefixtures("hangups")
@pytest.mark.parametrize(("ignored", "configured"), [(True, True), (True, False), (False, True)])
def test_a_run_that_sighup_cannot_reload_says_so_once(
    ignored: bool, configured: bool, source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run.toml").write_text("rate = 100000\n")
    more = ("--config", tmp_path / "run.toml") if configured else ()
    if ignored:  # as by nohup
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with Stop() as stop:
        assert stop.reload_ignored == ignored == (signal.getsignal(signal.SIGHUP) is signal.SIG_IGN)
    assert main(run_arguments(tmp_path / "out", [source], 10, *more)) == 0
    assert capsys.readouterr().err.count("SIGHUP is ignored") == (ignored and configured)


def sends(number: signal.Signals) -> Callable[[dict[str, Any]], dict[str, Any]]:
    def send(row: dict[str, Any]) -> dict[str, Any]:
        if row["id"] == 100:
            os.kill(os.getpid(), number)
        return row

    return send


hangs_up, asks_for_the_end = sends(signal.SIGHUP), sends(signal.SIGUSR1)


@pytest.mark.usefixtures("hangups")
@pytest.mark.parametrize("name", ["hangs_up", "asks_for_the_end"])
def test_plain_files_reach_the_end(name: str, source: Path, out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(run_arguments(out, [source], 10, "--transform", f"{__name__}:{name}")) == 0
    assert capsys.readouterr().err.count('event=note message="SIGHUP received') == (name == "hangs_up")
    assert ids(out) == list(range(ROWS))
    assert (out / "stream.end").exists()


def dozes(row: dict[str, Any]) -> None:
    print("dozing", flush=True)
    time.sleep(600)


def test_ctrl_c_breaks_off_what_leaves_nothing_half_done(nursery: Commands, source: Path, tmp_path: Path) -> None:
    arguments = run_arguments(tmp_path / "out", [source], 10, "--transform", f"{__name__}:dozes")
    with Running(nursery, "check", *arguments[1:]) as run:
        run.wait_until(lambda: "dozing" in run.said())
        assert run.end(signal.SIGINT)[0] == 130


def notes(out: Path) -> str:
    return str(head(out).get("note", ""))


@contextmanager
def live_run(kind: str, folder: Path, out: Path, nursery: Commands, *options: object) -> Iterator[Running]:
    """A run that has got rows 0 to 6, three to a chunk, and waits for more of the one live source it has."""
    pipe, stdin, arguments = folder / "pipe", None, run_arguments(out, [], 3, *options)
    with ExitStack() as stack:
        if kind == "followed":
            (folder / "in").mkdir()
            (folder / "in" / "a.jsonl").write_bytes(rows(0, 7))
            arguments += ["--follow", str(folder / "in")]
        elif kind == "generator":
            arguments += ["--source", "python:tests.producer.recipes:seven"]
        else:
            os.mkfifo(pipe)
            # For both, so that opening it does not wait.
            stack.enter_context(pipe.open("r+b", buffering=0)).write(rows(0, 7))
            stdin = pipe if kind == "stdin" else None
            arguments += ["--source", "-" if kind == "stdin" else str(pipe)]
        run = stack.enter_context(Running(nursery, *arguments, stdin=stdin))
        # Of a block of five rows one chunk is published, and the two rows behind it wait for others.
        chunks = 1 if "--shuffle" in options else 2
        run.wait_until(lambda: head(out).get("state") == "waiting" and published(out) == chunks)
        yield run


@pytest.mark.parametrize(
    ("kind", "recipe", "number", "code"),
    [
        ("stdin", (), signal.SIGINT, 130),
        ("stdin", SHUFFLED, signal.SIGUSR1, 0),
        ("pipe", (), signal.SIGTERM, 0),
        ("pipe", IN_WORKERS, signal.SIGUSR1, 0),
        ("followed", (), signal.SIGTERM, 0),
        ("followed", SHUFFLED, signal.SIGUSR1, 0),
        ("generator", (), signal.SIGTERM, 0),
        ("generator", (), signal.SIGUSR1, 0),
    ],
)
def test_sigusr1_ends_a_live_source_and_with_it_the_stream_and_others_stop_at_once(
    kind: str, recipe: tuple[object, ...], number: signal.Signals, code: int, nursery: Commands, tmp_path: Path
) -> None:
    out, ends = tmp_path / "out", number == signal.SIGUSR1
    with live_run(kind, tmp_path, out, nursery, *recipe) as run:
        assert recipe or "; 1 of the 3 rows of the next chunk" in notes(out)
        status, text = run.end(number)
    assert (status, "event=end result=finished" in text) == (code, ends)
    assert sorted(ids(out)) == list(range(7 if ends else 6))
    assert (head(out)["state"] == "idle", head(out)["ended"]) == (not ends, ends)
    assert (out / "stream.end").exists() == ends
    assert not (out / ".tmp").exists()


def test_nobody_has_opened_the_pipe(nursery: Commands, tmp_path: Path) -> None:
    pipe, out = tmp_path / "pipe", tmp_path / "out"
    os.mkfifo(pipe)
    for number in (signal.SIGTERM, signal.SIGUSR1):
        with Running(nursery, *run_arguments(out, [pipe], 3)) as run:
            run.wait_until(lambda: head(out).get("pid") == run.pid and str(pipe) in notes(out))
            assert run.end(number)[0] == 0
    assert json.loads((out / "stream.end").read_bytes())["samples"] == 0


def test_the_published_part_of_a_pipe_is_waited_for_and_told(nursery: Commands, out: Path, tmp_path: Path) -> None:
    with live_run("pipe", tmp_path, out, nursery) as run:
        run.end(signal.SIGTERM)
    arguments = run_arguments(out, [tmp_path / "pipe"], 3)
    with (tmp_path / "pipe").open("r+b", buffering=0) as pipe, Running(nursery, *arguments) as run:
        run.wait_until(lambda: "to be read again: 0 of " in notes(out))
        pipe.write(rows(0, 11))
        run.wait_until(lambda: published(out) == 3)
        assert run.end(signal.SIGUSR1)[0] == 0
    assert ids(out) == list(range(11))


def test_sigusr1_does_not_end_the_wait_for_room(nursery: Commands, tmp_path: Path) -> None:
    out, config = tmp_path / "out", tmp_path / "run.toml"
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.jsonl").write_bytes(rows(0, 10))
    text = f'out = "{out}"\nsamples_per_chunk = 3\n[[source]]\nfollow = "{tmp_path}/in"\n[limits]\nmax_ahead = '
    config.write_text(text + "1")
    with Running(nursery, "run", "--config", config) as run:
        run.wait_until(lambda: "--max-ahead 1 chunk" in notes(out))
        run.send(signal.SIGUSR1)
        config.write_text(text + "2")
        run.send(signal.SIGHUP)
        run.wait_until(lambda: published(out) == 2 and "--max-ahead 2 chunks" in notes(out))
        config.write_text(text + "100")
        assert run.end(signal.SIGHUP)[0] == 0
    assert ids(out) == list(range(10))
    assert (out / "stream.end").exists()


def reloaded(load: Callable[[], Settings]) -> tuple[Settings, list[str], list[str]]:
    notes, warnings = list[str](), list[str]()
    teller: Any = SimpleNamespace(note=notes.append, warn=warnings.append)
    return reload_settings(OLD, load, teller), notes, warnings


def kept(new: Settings) -> tuple[Settings, list[str]]:
    settings, _, warnings = reloaded(lambda: new)
    return settings, [text.partition(" cannot change ")[0] for text in warnings]


@pytest.mark.parametrize("name", [one.name for one in fields(Settings) if one.name not in CHANGING])
def test_what_may_not_change(name: str) -> None:
    other: Any = "other"
    new = replace(OLD, rate=3.0, **{name: other})
    assert kept(new) == (replace(OLD, rate=3.0), [CALLED.get(name, name)])


def test_what_may_change_does_and_is_told() -> None:
    ahead = Limits(max_ahead=Amount(number=64, unit="chunks"), max_disk=10**9, consumers=("train",))
    new = replace(OLD, rate=2.5, max_bad_rows=7, limits=ahead, log_every_s=5.0)
    settings, (note,), warnings = reloaded(lambda: new)
    assert (settings, warnings) == (new, [])
    assert note.partition(": ")[2].split(", ") == [
        "rate from none to 2.5",
        "log_every_seconds from 60.0 to 5.0",
        "max_bad_rows from 5 to 7",
        "max_ahead from none to 64 chunks",
        "max_disk from none to 1.0 GB",
        "consumers from none to train",
    ]


def test_what_changes_nothing() -> None:
    for policy in ("fail", "quarantine"):  # Nor the cap on bad rows, where the policy would change
        assert kept(replace(OLD, on_bad_row=policy, max_bad_rows=None)) == (OLD, ["on_bad_row"])
    settings, notes, warnings = reloaded(lambda: OLD)
    assert (settings, len(notes), warnings) == (OLD, 1, [])
    for error in (SettingInvalid("run.toml: no TOML"), OSError(5, "Input/output error")):
        settings, notes, (warning,) = reloaded(raising(error))
        assert (settings, notes, str(error) in warning) == (OLD, [], True)


def test_a_run_takes_its_new_rate_and_its_new_cap_on_bad_rows(nursery: Commands, source: Path, tmp_path: Path) -> None:
    out, config = tmp_path / "out", tmp_path / "run.toml"
    source.write_bytes(b"bad\n" + rows(0, 50) + b"bad\n" + rows(50, 100) + b"bad\n")
    text = f'out = "{out}"\nsamples_per_chunk = 10\nrate = RATE\n[[source]]\npath = "{source}"\n'
    text += '[rows]\non_bad_row = "quarantine"\nmax_bad_rows = MOST\n'
    config.write_text(text.replace("RATE", "0.001").replace("MOST", "1"))
    with Running(nursery, "run", "--config", config) as run:
        # In the middle of a wait of 1,000 seconds.
        run.wait_until(lambda: head(out).get("state") == "waiting")
        config.write_text("rate = fast")
        run.send(signal.SIGHUP)
        config.write_text(text.replace("RATE", "100000").replace("MOST", "2"))
        status, err = run.end(signal.SIGHUP)
    assert status == 3, err
    assert ids(out) == list(range(100))
    assert "rate from 0.001 to 100000.0" in err and "max_bad_rows from 1 to 2" in err
