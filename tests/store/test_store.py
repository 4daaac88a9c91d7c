"""The store: objects under conditions, what is repeated, and what its errors say."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from lazyshard.errors import StoreRefused, StoreUnavailable
from lazyshard.store.objects import PATIENCE_VARIABLE, ObjectStore
from lazyshard.store.urls import UrlPath
from tests.store.server import BROKEN, BUSY, Gate, Mute, Server
from tests.stream.streams import forked


@pytest.fixture(params=["s3", "memory"])
def store(request: pytest.FixtureRequest, bucket: UrlPath) -> ObjectStore:
    return ObjectStore(str(bucket) if request.param == "s3" else f"memory://{bucket.key}/{id(bucket)}")


def test_what_was_put_is_got_whole_or_in_part(store: ObjectStore) -> None:
    store.put("a/b", b"hello")
    assert store.get("a/b") == b"hello"
    assert store.get("a/b", 2) == b"he"
    assert [store.get_range("a/b", *ends) for ends in [(1, 3), (3, 99), (5, 9), (7, 9)]] == [b"el", b"lo", b"", b""]
    assert store.size("a/b") == 5
    store.put("a/b", b"")
    assert (store.get("a/b"), store.size("a/b"), store.exists("a/b")) == (b"", 0, True)


def test_what_is_not_there_is_missing_by_its_url(store: ObjectStore) -> None:
    for call in (store.get, store.size, store.get_tagged, store.list, store.modified):
        with pytest.raises(FileNotFoundError) as caught:
            call("none")
        assert caught.value.filename == f"{store.url}/none"
    assert not store.exists("none")
    store.delete("none")


def test_a_listing_names_what_lies_right_under_a_folder(store: ObjectStore) -> None:
    store.put("a", b"1")
    store.put("b/c", b"22")
    store.put("b/d/e", b"333")
    assert store.list() == {"a": 1, "b": 0}
    assert store.list("b") == {"c": 2, "d": 0}
    store.put("f", b"")
    store.delete("a")
    assert set(store.list()) == {"b", "f"}


def test_a_condition_decides_who_comes_first(store: ObjectStore) -> None:
    assert store.put_new("a", b"1")
    assert not store.put_new("a", b"2")
    data, tag = store.get_tagged("a")
    assert data == b"1"
    assert store.put_matching("a", b"3", tag)
    assert not store.put_matching("a", b"4", tag)
    assert not store.put_matching("none", b"5", tag)
    assert store.get("a") == b"3"
    assert not store.exists("none")


@pytest.mark.parametrize("body", [(503, BUSY), (500, BROKEN), (502, b"bad gateway")], ids=["busy", "broken", "proxy"])
def test_what_passes_is_repeated(server: Server, bucket: UrlPath, body: tuple[int, bytes]) -> None:
    store = ObjectStore(str(bucket))
    left = {"GET": 2, "PUT": 2}

    def fault(method: str, key: str) -> Any:
        left[method] -= 1
        return body if left[method] >= 0 else None

    server.fault = fault
    store.put("a", b"1")
    assert store.get("a") == b"1"
    assert server.asked == {("PUT", "some/stream/a"): 3, ("GET", "some/stream/a"): 3}


@pytest.mark.parametrize("interim", [0, 1, 2])
def test_a_server_that_is_mute_is_given_up_whatever_it_said_before(
    server: Server, monkeypatch: pytest.MonkeyPatch, interim: int
) -> None:
    with Mute(interim) as mute:
        monkeypatch.setenv("AWS_ENDPOINT_URL", mute.url)
        options = {"config_kwargs": {"connect_timeout": 0.3, "read_timeout": 0.3}}
        store = ObjectStore("s3://bucket/some", patience_s=0, options=options)
        for call in (store.put_new, store.put):
            with pytest.raises(StoreUnavailable, match=r"writing it has failed .*(no end of the request|imeout)"):
                call("a", b"1")


def test_a_connection_that_is_cut_is_repeated(server: Server, bucket: UrlPath) -> None:
    store = ObjectStore(str(bucket))
    store.put("a", b"1" * 1000)
    cuts = [lambda data: [data[:10]]]
    server.fault = lambda method, key: cuts.pop() if cuts else None
    assert store.get("a") == b"1" * 1000


def test_a_put_whose_answer_was_lost_was_not_another_ones(server: Server, bucket: UrlPath) -> None:
    store = ObjectStore(str(bucket))

    def lose(method: str, key: str) -> Any:
        if method != "PUT" or server.asked[method, key] > 1:
            return None
        # It is done, and then the answer is an error.
        store.put("a", b"1")
        return 500, BROKEN

    server.fault = lose
    assert store.put_new("a", b"1")
    assert store.get("a") == b"1"


def test_patience_ends_and_says_what_to_do(server: Server, bucket: UrlPath) -> None:
    server.fault = lambda method, key: (503, BUSY)
    with pytest.raises(StoreUnavailable) as caught:
        ObjectStore(str(bucket), patience_s=0.3).get("a")
    assert str(caught.value).startswith(f"{bucket}/a: reading it has failed for ")
    assert "SlowDown" in str(caught.value)
    assert PATIENCE_VARIABLE in str(caught.value)
    assert caught.value.url == f"{bucket}/a"


def test_nothing_answers(server: Server, bucket: UrlPath, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    with pytest.raises(StoreUnavailable, match="Could not connect"):
        ObjectStore(str(bucket), patience_s=0.3).get("a")


def test_an_answer_that_does_not_come_is_not_waited_for(
    server: Server, bucket: UrlPath, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate()
    store = ObjectStore(str(bucket), patience_s=0.5, options={"config_kwargs": {"read_timeout": 0.3}})
    store.put("a", b"1" * 1000)
    server.fault = lambda method, key: gate.hold
    try:
        with pytest.raises(StoreUnavailable, match="imeout"):
            store.get("a")
    finally:
        gate.open()


@pytest.mark.parametrize(
    ("url", "told"),
    [("s3://no-such-bucket/a", "Make the bucket"), ("nothing://bucket/a", r"pip install 'lazyshard\[objects\]'")],
)
def test_what_never_will_be_is_refused_at_once(server: Server, url: str, told: str) -> None:
    for call in (ObjectStore(url).get, ObjectStore(url).size, ObjectStore(url).list):
        with pytest.raises(StoreRefused, match=told):
            call("b")
    assert sum(server.asked.values()) < 12


def test_no_right_is_refused_at_once(server: Server, bucket: UrlPath) -> None:
    denied = b"<Error><Code>AccessDenied</Code><Message>Access Denied</Message></Error>"
    server.fault = lambda method, key: (403, denied)
    with pytest.raises(StoreRefused, match=r"Access Denied\. See to the credentials and their rights"):
        ObjectStore(str(bucket)).get("a")
    assert sum(server.asked.values()) == 1


def test_no_credentials_are_refused_at_once(server: Server, bucket: UrlPath, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    with pytest.raises(StoreRefused, match=r"Unable to locate credentials.*AWS_ACCESS_KEY_ID"):
        ObjectStore(str(bucket)).get("a")


def test_an_endpoint_that_is_no_url_is_refused_at_once(bucket: UrlPath, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "127.0.0.1:9")
    with pytest.raises(StoreRefused, match="correct AWS_ENDPOINT_URL"):
        ObjectStore(str(bucket)).get("a")


@pytest.mark.parametrize("text", ["-1", "soon", "nan"])
def test_a_patience_that_is_none_is_refused(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PATIENCE_VARIABLE, text)
    with pytest.raises(StoreRefused, match=PATIENCE_VARIABLE):
        ObjectStore("s3://bucket/a")


def test_a_fork_and_a_pickle_have_connections_of_their_own(bucket: UrlPath) -> None:
    store = ObjectStore(str(bucket))
    store.put("a", b"1")
    assert pickle.loads(pickle.dumps(store)).get("a") == b"1"
    assert forked(lambda: _check(store)) == 0
    assert store.get("a") == b"1"


def _check(store: ObjectStore) -> None:
    assert store.get("a") == b"1"
