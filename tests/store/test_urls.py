"""What is a URL and what is a path is decided in one place; a URL is a path that no filesystem takes."""

from __future__ import annotations

import copy
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from lazyshard.store.urls import UrlPath, is_folder, is_url, stream_name, stream_path
from tests.stream.streams import HERE, produce


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


@pytest.mark.parametrize("given", ["stream", "/a/stream", "a:/b", "s3:/bucket/a", "./s3://", "1s3://a", "", "a b://c"])
def test_a_path_stays_one(given: str) -> None:
    assert type(stream_path(given)) is type(Path())
    assert stream_path(given) == Path(given)
    assert not is_url(given)


@pytest.mark.parametrize("given", ["file:///a/b", "local:///a/b", "FILE:///a/b"])
def test_a_url_of_a_file_is_a_path(given: str) -> None:
    assert stream_path(given) == Path("/a/b")
    assert not is_url(given)


def test_no_filesystem_takes_a_url() -> None:
    path = stream_path("s3://bucket/a")
    for call in (os.stat, os.listdir, open, Path.exists, os.path.abspath, Path.mkdir):
        with pytest.raises(TypeError, match=r"^s3://bucket/a: an object store's URL is no path"):
            call(path)
    with pytest.raises(TypeError):
        os.path.isdir(path)


def test_a_local_stream_needs_neither_fsspec_nor_s3fs(tmp_path: Path) -> None:
    produce(tmp_path / "stream", 5)
    source = (
        "import sys\n"
        "for name in ('fsspec', 's3fs', 'boto3', 'botocore', 'aiohttp'): sys.modules[name] = None\n"
        "from lazyshard import StreamReader\n"
        "from lazyshard.stream import list_consumers\n"
        "assert len(list(StreamReader(sys.argv[1]))) == 5\n"
        "list_consumers(sys.argv[1])\n"
        "try: StreamReader('s3://bucket/a')\n"
        "except Exception as error: print(type(error).__name__, error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", source, str(tmp_path / "stream")], cwd=HERE, capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith("StoreRefused s3://bucket/a/stream.json: reading it was refused")
    assert "pip install 'lazyshard[objects]'" in done.stdout
