"""The store: objects under conditions, what is repeated, and what its errors say."""

import copy
import os
import pickle
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from fsspec.config import conf

from lazyshard.errors import AccessRefused, ConfigInvalid, StoreUnavailable
from lazyshard.store.files import UrlPath, is_folder, is_url, stream_name, stream_path
from lazyshard.store.objects import PATIENCE_VARIABLE, ObjectStore
from tests.harness.processes.environment import environment, run_command
from tests.store.server import BROKEN, BUSY, Gate, Server, mute
from tests.stream.streams import forked, raised, refusal_of


@pytest.fixture(params=["s3", "memory"])
def store(request: pytest.FixtureRequest, bucket: UrlPath) -> ObjectStore:
    return ObjectStore(str(bucket) if request.param == "s3" else f"memory://{bucket.key}/{id(bucket)}")


def test_what_was_put_is_got_listed_and_deleted_and_what_is_not_there_is_missing_by_its_url(store: ObjectStore) -> None:
    store.put("a/b", b"hello")
    assert store.get("a/b") == b"hello"
    assert store.get("a/b", 2) == b"he"
    assert [store.get_range("a/b", *ends) for ends in [(1, 3), (3, 99), (5, 9), (7, 9)]] == [b"el", b"lo", b"", b""]
    assert store.size("a/b") == 5
    store.put("a/b", b"")
    assert (store.get("a/b"), store.size("a/b"), store.exists("a/b")) == (b"", 0, True)
    for call in (store.get, store.size, store.get_tagged, store.list, store.modified):
        assert raised(FileNotFoundError, call, "none").filename == f"{store.url}/none"
    assert not store.exists("none")
    store.delete("none")
    # A listing names what lies right under a folder.
    for name, data in (("c", b"1"), ("a/c", b"22"), ("a/d/e", b"333")):
        store.put(name, data)
    assert store.list() == {"a": 0, "c": 1}
    assert store.list("a") == {"b": 0, "c": 2, "d": 0}
    store.delete("c")
    assert set(store.list()) == {"a"}


def test_a_condition_decides_who_comes_first(store: ObjectStore) -> None:
    assert store.put_new("a", b"1")
    assert not store.put_new("a", b"2")
    data, tag = store.get_tagged("a")
    assert data == b"1"
    assert store.swap("a", b"3", tag)
    assert not store.swap("a", b"4", tag)
    assert not store.swap("none", b"5", tag)
    assert store.get("a") == b"3"
    assert not store.exists("none")


@pytest.mark.parametrize(
    ("answers", "puts"),
    [([(503, BUSY), (500, BROKEN)], 3), ([(502, b"bad gateway"), (503, b"")], 3), ([lambda data: [data[:10]]] * 2, 1)],
    ids=["store", "proxy", "cut"],
)
def test_what_passes_is_repeated(server: Server, bucket: UrlPath, answers: list[Any], puts: int) -> None:
    store = ObjectStore(str(bucket))
    # A PUT that is cut is done.
    left = {"GET": [*answers], "PUT": answers[: puts - 1]}
    server.fault = lambda method, key: left[method].pop() if left[method] else None
    store.put("a", b"1" * 1000)
    assert store.get("a") == b"1" * 1000
    assert server.asked == {("PUT", "some/stream/a"): puts, ("GET", "some/stream/a"): 3}


@pytest.mark.parametrize("interim", [0, 2])
def test_a_mute_server_is_given_up(server: Server, monkeypatch: pytest.MonkeyPatch, interim: int) -> None:
    with mute(interim) as url:
        monkeypatch.setenv("AWS_ENDPOINT_URL", url)
        monkeypatch.setitem(conf, "s3", {"config_kwargs": {"connect_timeout": 0.2, "read_timeout": 0.2}})
        store = ObjectStore("s3://bucket/some", patience_s=0)
        for call in (store.put_new, store.put):
            refusal_of(StoreUnavailable, r"no end of the request|imeout", call, "a", b"1")


def test_patience_ends(server: Server, bucket: UrlPath, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate()
    monkeypatch.setitem(conf, "s3", {"config_kwargs": {"read_timeout": 0.3}})
    answers: list[tuple[Any, str]] = [((503, BUSY), "SlowDown"), (gate.hold, "imeout"), (None, "Could not connect")]
    ObjectStore(str(bucket)).put("a", b"1" * 1000)
    try:
        for answer, told in answers:
            server.fault = lambda method, key, answer=answer: answer  # type: ignore[misc]
            if answer is None:
                monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
            caught = refusal_of(StoreUnavailable, told, ObjectStore(str(bucket), patience_s=0.3).get, "a")
            assert caught.url == f"{bucket}/a"
    finally:
        gate.open()


def test_failure_of_a_thread_is_told_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    store, began = ObjectStore("memory://bucket"), time.monotonic() - 12
    for _ in range(3):
        for started in (began, began + 1):
            store._wait(0.1, started, 60.0, "reading", "refused")
    assert len(caplog.messages) == 2


DENIED = b"<Error><Code>AccessDenied</Code><Message>Access Denied</Message></Error>"


@pytest.mark.parametrize(
    ("url", "environment", "answer", "told"),
    [
        ("s3://no-such-bucket/a", {}, None, "Create the bucket"),
        ("nothing://bucket/a", {}, None, r"pip install 'lazyshard\[objects\]'"),
        ("", {}, (403, DENIED), "Access Denied"),
        ("", {"AWS_ACCESS_KEY_ID": "", "AWS_SECRET_ACCESS_KEY": ""}, None, "AWS_ACCESS_KEY_ID"),
        ("", {"AWS_ENDPOINT_URL": "127.0.0.1:9"}, None, "AWS_ENDPOINT_URL"),
    ],
)
def test_what_never_will_be_is_refused_at_once(
    server: Server, bucket: UrlPath, url: str, environment: Any, answer: Any, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
        if not value:
            monkeypatch.delenv(name)
    server.fault = lambda method, key: answer
    store = ObjectStore(url or str(bucket))
    for call in (store.get, store.size, store.list) if url else (store.get,):
        refusal_of(AccessRefused, told, call, "b")
    assert server.asked.total() < 6


def test_a_patience_that_is_none_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for text in ("-1", "soon", "nan"):
        monkeypatch.setenv(PATIENCE_VARIABLE, text)
        refusal_of(ConfigInvalid, PATIENCE_VARIABLE, ObjectStore, "s3://bucket/a")


def test_a_fork_and_a_pickle_have_connections_of_their_own(bucket: UrlPath) -> None:
    store = ObjectStore(str(bucket))
    store.put("a", b"1")
    assert pickle.loads(pickle.dumps(store)).get("a") == b"1"
    assert forked(lambda: os._exit(store.get("a") != b"1")) == 0
    assert store.get("a") == b"1"


@pytest.mark.parametrize(
    ("given", "shown", "bucket", "key"),
    [
        ("s3://bucket/a/b", "s3://bucket/a/b", "s3://bucket", "a/b"),
        ("S3://bucket/a/b/", "s3://bucket/a/b", "s3://bucket", "a/b"),
        ("gs://bucket", "gs://bucket", "gs://bucket", ""),
        ("abfs://box@account.net/a b", "abfs://box@account.net/a b", "abfs://box@account.net", "a b"),
    ],
)
def test_a_url_stays_one(given: str, shown: str, bucket: str, key: str) -> None:
    path = stream_path(given)
    assert isinstance(path, UrlPath)
    for one in (path, stream_path(path), pickle.loads(pickle.dumps(path)), copy.copy(path), (path / "c").parent):
        assert isinstance(one, UrlPath)
        assert (str(one), one.store.url, one.key, one == path, hash(one)) == (shown, bucket, key, True, hash(path))
    below = path / "cursors" / "x.json"
    assert (str(below), below.name, str(below.parent)) == (f"{shown}/cursors/x.json", "x.json", f"{shown}/cursors")
    assert f"{path}" == shown
    assert stream_name(given) == shown
    assert is_url(given) and is_url(path) and is_folder(given)


def test_a_path_and_a_url_of_a_file_are_a_path() -> None:
    paths = ("stream", "/a/stream", "a:/b", "s3:/bucket/a", "./s3://", "1s3://a", "", "a b://c")
    files = dict.fromkeys(("file:///a/b", "local:///a/b", "FILE:///a/b"), "/a/b")
    for given, path in {**{one: one for one in paths}, **files}.items():
        assert type(stream_path(given)) is type(Path())
        assert stream_path(given) == Path(path)
        assert not is_url(given)
    calls: list[Any] = [os.stat, os.listdir, open, Path.exists, os.path.abspath, Path.mkdir, os.path.isdir]
    for call in calls:
        refusal_of(TypeError, r"^s3://bucket/a: ", call, stream_path("s3://bucket/a"))


def test_a_local_stream_needs_neither_fsspec_nor_s3fs(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_bytes(b'{"id":0}\n' * 5)
    source = (
        "import sys\n"
        "for name in ('fsspec', 's3fs', 'boto3', 'botocore', 'aiobotocore', 'aiohttp'): sys.modules[name] = None\n"
        "from lazyshard import StreamReader\n"
        "from lazyshard.stream import list_consumers\n"
        "from lazyshard_producer.cli import main\n"
        "place, stream = sys.argv[1], sys.argv[1] + '/stream'\n"
        "assert main(f'run --source {place}/in.jsonl --out {stream} --samples-per-chunk 2'.split()) == 0\n"
        "assert len(list(StreamReader(stream))) == 5\n"
        "list_consumers(stream)\n"
        "try: StreamReader('s3://bucket/a')\n"
        "except Exception as error: print(type(error).__name__, error)\n"
    )
    done = run_command(sys.executable, "-c", source, tmp_path, env=environment())
    assert done.stdout.splitlines()[-1].startswith("AccessRefused s3://bucket/a/stream.json: ")
    assert "pip install 'lazyshard[objects]'" in done.stdout
