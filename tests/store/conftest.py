"""A server for all tests of a process, and for each of them a bucket and a cache of its own."""

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("moto", reason="needs the extra objects, and moto")
pytest.importorskip("s3fs", reason="needs the extra objects")

from lazyshard.store.files import FOLDER_VARIABLE, UrlPath, stream_path
from lazyshard.store.objects import PATIENCE_VARIABLE
from tests.harness.processes.commands import Commands
from tests.harness.processes.producing import rows
from tests.store import remembered
from tests.store.producing import Run
from tests.store.server import Server, _none


@pytest.fixture(scope="session")
def running() -> Iterator[Server]:
    with pytest.MonkeyPatch.context() as patch:
        _credentials(patch)
        server = Server()
        yield server
        server.stop()


@pytest.fixture
def server(running: Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Server]:
    _credentials(monkeypatch)
    monkeypatch.setenv("AWS_ENDPOINT_URL", running.url)
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "cache"))
    monkeypatch.setenv(PATIENCE_VARIABLE, "20")
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    running.asked.clear()
    yield running
    running.fault = _none


@pytest.fixture
def bucket(server: Server, tmp_path: Path) -> UrlPath:
    """The URL of a prefix in a bucket of the test's own."""
    name = f"test-{abs(hash(str(tmp_path))):x}"
    server.make_bucket(name)
    server.asked.clear()
    path = stream_path(f"s3://{name}/some/stream")
    assert isinstance(path, UrlPath)
    return path


def _credentials(patch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        patch.setenv(name, "for-tests")
    patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    # Whoever runs the tests may have settings of their own.
    patch.setenv("AWS_CONFIG_FILE", "/dev/null")
    patch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/dev/null")
    patch.delenv("AWS_PROFILE", raising=False)
    patch.setenv("AWS_EC2_METADATA_DISABLED", "true")


@contextlib.contextmanager
def _commands(running: Server, folder: Path) -> Iterator[Commands]:
    """Runs producer commands that find the server."""
    with contextlib.ExitStack() as stack:
        with pytest.MonkeyPatch.context() as patch:
            _credentials(patch)
            patch.setenv("AWS_ENDPOINT_URL", running.url)
            modules = ("s3fs", remembered.__name__, "lazyshard_producer.shipping")
            found: Commands = stack.enter_context(Commands(folder, *modules))
        yield found


@pytest.fixture(scope="session")
def nursery(running: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Commands]:
    with _commands(running, tmp_path_factory.mktemp("nursery")) as found:
        yield found


@pytest.fixture(scope="session")
def other_nursery(running: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Commands]:
    """For what runs while the first one is busy: while it waits for the end of a command."""
    with _commands(running, tmp_path_factory.mktemp("other")) as found:
        yield found


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "in.jsonl"
    path.write_bytes(rows(0, 7))
    return path


@pytest.fixture
def run(nursery: Commands, server: Server, bucket: UrlPath, tmp_path: Path, source: Path) -> Run:
    """A command that publishes the source in chunks of three rows."""
    return Run(nursery, server, bucket, tmp_path, "--source", source, "--samples-per-chunk", 3)
