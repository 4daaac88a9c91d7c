"""The credentials in a stream's URL open it, and stand nowhere else: not in output, files, errors or answers."""

import json
import logging
import pickle
import traceback
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import pytest

pytest.importorskip("fsspec", reason="needs the extra objects")

import fsspec

from lazyshard import BlendedDataset, LazyShardedDataset, StreamReader
from lazyshard.cli.main import main
from lazyshard.cli.watch_server import metrics_page, stream_looks, watch_values
from lazyshard.errors import AccessRefused, ChunkCorrupt, StoreUnavailable, redact
from lazyshard.store.files import FOLDER_VARIABLE, UrlPath, stream_name, stream_path
from lazyshard.store.objects import PATIENCE_VARIABLE
from lazyshard_producer.cli import main as producer
from tests.harness.processes.producing import rows
from tests.stream.streams import raised

NOW: Final = 1_700_000_000.0
SECRETS: Final = ("hunter2pass", "0f3c5a99signed")
PASSWORD, SIGNATURE = SECRETS


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("s3://bucket/a b: no answer", "s3://bucket/a b: no answer"),
        ("abfs://box@account.net/a, user@host", "abfs://box@account.net/a, user@host"),
        ("http://host:9000/a@b and s3://b: c@d", "http://host:9000/a@b and s3://b: c@d"),
        ("ftp://me:pw@host/a", "ftp://***@host/a"),
        ("'ftp://me@x.org:p@w@host:21/a'", "'ftp://***@host:21/a'"),
        ("s3://AKIA:wJal/rX+=@bucket/a", "s3://***@bucket/a"),
        ("https://t0ken@host/a", "https://***@host/a"),
        ('["https://h/a?X-Amz-Signature=0f&x=1","b"]', '["https://h/a?***","b"]'),
        ("az://h/a?sig=0f%2F/stream.json is gone", "az://h/a?*** is gone"),
        ("what? me:pw@host", "what? me:pw@host"),
    ],
)
def test_what_is_redacted_of_a_text(text: str, shown: str) -> None:
    assert redact(text) == shown
    assert redact(redact(text)) == shown
    url = "s3://me:p%40ss%2Fw@bucket/a?sig=abcd"  # A driver that repeats the password alone
    assert redact('bucket "me:p%40ss%2Fw@bucket", p@ss/w, abcd', url) == 'bucket "***@bucket", ***, ***'


def test_errors_hold_no_credentials() -> None:
    url = f"ftp://me:{PASSWORD}@host/a?sig={SIGNATURE}"
    error = ChunkCorrupt(f"{url}: bad", file=url, expected=url, chunk=3)
    for one in (error, pickle.loads(pickle.dumps(error))):
        assert_hidden(str(one), repr(one), vars(one), pickle.dumps(one))
        assert one.chunk == 3
    error.carry_fields()
    assert_hidden(str(error), ChunkCorrupt(str(error)).file)


def assert_hidden(*told: object) -> None:
    for one in told:
        text = one if isinstance(one, str) else repr(one)
        for secret in SECRETS:
            assert secret not in text, text


@pytest.fixture(autouse=True)
def settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "cache"))
    monkeypatch.setenv(PATIENCE_VARIABLE, "0")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def place() -> Iterator[Callable[[str], str]]:
    host = uuid.uuid4().hex
    yield lambda name: f"memory://me:{PASSWORD}@{host}/{name}?sig={SIGNATURE}"
    _store().clear()


def _store() -> dict[str, Any]:
    found: dict[str, Any] = fsspec.filesystem("memory").store
    return found


class Sweep:  # Runs commands and other things, and looks at all that they print, log, and leave in a folder
    def __init__(self, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
        self._capfd, self._caplog, self._folder = capfd, caplog, tmp_path
        caplog.set_level(logging.INFO)

    def run(self, program: Callable[[list[str]], int], *arguments: str) -> tuple[int, str]:
        self._capfd.readouterr()
        code = program(list(arguments))
        told = "".join(self._capfd.readouterr())
        assert_hidden(told)
        return code, told

    def fails(self, call: Callable[[], object], *errors: type[BaseException]) -> None:
        error = raised(errors, call)
        assert_hidden(str(error), vars(error), "".join(traceback.format_exception(error)), pickle.dumps(error))

    def check_files(self) -> None:
        assert_hidden(self._caplog.text)
        assert_hidden(*(file.getvalue() for file in _store().values()))
        (self._folder / "train.json").unlink(missing_ok=True)
        for path in self._folder.rglob("*"):
            assert_hidden(path.name, path.read_bytes() if path.is_file() else b"")


@pytest.fixture
def sweep(capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture, tmp_path: Path) -> Sweep:
    return Sweep(capfd, caplog, tmp_path)


def produce(sweep: Sweep, folder: Path, url: str, *more: str) -> None:
    source = folder / "in.jsonl"
    source.write_bytes(rows(0, 7))
    given = ("--source", str(source), "--out", url, "--samples-per-chunk", "2", *more)
    assert sweep.run(producer, "check", *given)[0] == 0
    for _ in range(2):
        code, told = sweep.run(producer, "run", *given)
        assert (code, "memory://***@" in told) == (0, True)
    assert sweep.run(producer, "check", *given)[0] == 0


def test_nothing_told_or_left_holds_them(place: Callable[[str], str], sweep: Sweep, tmp_path: Path) -> None:
    first, second = place("one"), place("two")
    produce(sweep, tmp_path, first, "--metrics-port", "0", "--log-every-seconds", "0.001")
    produce(sweep, tmp_path, second, "--max-ahead", "100chunks")
    members = [LazyShardedDataset(url, dp_rank=0, dp_size=1, consumer="run") for url in (first, second)]
    blend = BlendedDataset([(one, 0.5) for one in members], batch_size=1)
    for drawn in range(5):
        blend[drawn]
    blend.commit(4, last_epoch=False)
    assert_hidden(repr(blend), repr(members[0]), str(members[0].directory), repr(members[0].directory))
    assert_hidden(json.dumps(blend.state_dict(4)))
    assert len(list(StreamReader(first))) == 7
    trace, audit = ("trace", first, "--consumer", "run"), ("audit", first, "--consumer", "run")
    doctor = ("doctor", "lazyshard", "--stream", first)
    for arguments in (
        *((name, first, *more) for name in ("status", "verify", "inspect") for more in ((), ("--json",))),
        *(("inspect", first, "3"), ("inspect", first, "--chunk", "1", "--json"), trace, (*trace, "--sample", "0")),
        *(audit, (*audit, "--json"), doctor, (*doctor, "--json"), ("watch", first, "--save", "page.html")),
        ("forget", second, "run", "--yes"),
    ):
        code, told = sweep.run(main, *arguments)
        assert (code, bool(told)) == (9 if arguments[0] == "audit" else 0, True), (arguments, told)
    assert sweep.run(main, "forget", second, "other", "--yes")[0] == 3
    facts = stream_looks(stream_path(first), 0.01).facts()
    assert_hidden(watch_values(stream_path(first), 1.0, facts, NOW), metrics_page(facts, NOW))
    sweep.check_files()


def test_failures(place: Callable[[str], str], sweep: Sweep, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    there, missing = place("one"), place("none")
    produce(sweep, tmp_path, there)
    given = ("--source", str(tmp_path / "in.jsonl"), "--samples-per-chunk", "2")
    for command in ("status", "verify", "inspect", "export", "trace", "audit"):
        more = {"export": ("out",), "trace": ("--sample", "0")}
        assert sweep.run(main, command, missing, *more.get(command, ()))[0] != 0
    assert sweep.run(main, "watch", there, "--save", there)[0] != 0
    (tmp_path / "train.json").write_text(json.dumps({"version": 1, "datasets": [{"path": there, "weight": there}]}))
    assert sweep.run(main, "check-config", "train.json")[0] == 3
    for url in ("nosuch" + there, "s3" + there.removeprefix("memory")):
        assert sweep.run(main, "status", url)[0] != 0
    sweep.run(producer, "quarantine", there)
    for url in (there + "#1", "nosuch" + there, "file" + there.removeprefix("memory")):
        assert sweep.run(producer, "run", *given, "--out", url, "--max-ahead", "x")[0] != 0
    sweep.run(producer, "run", *given, "--out", there, "--source", there)
    assert sweep.run(producer, "run", *given[:2], "--samples-per-chunk", "3", "--out", there)[0] != 0

    memory = fsspec.get_filesystem_class("memory")
    errors: list[Exception] = [
        OSError(f"cannot connect to {there}"),
        OSError(5, "bad answer", there),
        FileNotFoundError(2, f"no bucket me:{PASSWORD}@host", there),
        PermissionError(f"refused me:{PASSWORD}@host, sig={SIGNATURE}"),
        RuntimeError(f"unexpected {there}"),
    ]
    opened = StreamReader(there)
    for error in errors:

        def fail(*given: Any, error: Exception = error, **named: Any) -> Any:
            raise type(error)(*error.args) from OSError(f"because of {there}")

        for name in ("cat_file", "info", "ls", "pipe_file", "exists"):
            monkeypatch.setattr(memory, name, fail)
        path = stream_path(there)
        assert isinstance(path, UrlPath)
        for call in (
            lambda path=path: path.store.get(path.key),
            lambda path=path: path.store.list(path.key),
            lambda path=path: path.store.put(path.key, b""),
            lambda: opened.read(0),
            lambda: StreamReader(there, max_wait=0),
            lambda: LazyShardedDataset(there, dp_rank=0, dp_size=1, max_wait=0),
        ):
            sweep.fails(call, AccessRefused, StoreUnavailable, OSError, RuntimeError)
        assert sweep.run(main, "status", there)[0] != 0
        sweep.run(producer, "run", *given, "--out", there, "--store-patience-seconds", "0")
    sweep.check_files()


def test_a_url_keeps_them_for_whoever_opens_it(place: Callable[[str], str]) -> None:
    url = place("one")
    path = stream_path(url)
    assert isinstance(path, UrlPath)
    for one in (path, pickle.loads(pickle.dumps(path)), (path / "a").parent):
        assert (one.url, stream_name(one)) == (url, url)
        assert_hidden(str(one), f"{one}", repr(one), one.store.url, one.store.name_of("x"))
