"""`parallel`: what is told once goes through ms-swift's logger, the library's own lines are seen on every rank."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Iterator

import pytest

from lazyshard_swift import parallel


@contextlib.contextmanager
def clean() -> Iterator[logging.Logger]:
    """The library's logger without a handler, as in a program that has set up none. Pytest gives the root some."""
    logger, root = logging.getLogger("lazyshard"), logging.getLogger()
    before = (logger.handlers[:], logger.propagate, logger.level), root.handlers[:]
    logger.handlers[:], logger.propagate, root.handlers[:] = [], True, []
    try:
        yield logger
    finally:
        (logger.handlers[:], logger.propagate, logger.level), root.handlers[:] = before


def test_notice_goes_through_ms_swifts_logger(notices: list[str]) -> None:
    parallel.notice("100% of {what} %s is there")
    assert notices == ["lazyshard: 100% of {what} %s is there"]


def test_notice_without_ms_swift_is_not_an_error(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "swift.utils", None)
    with caplog.at_level(logging.INFO, "lazyshard"):
        parallel.notice("told")
    assert [(record.name, record.getMessage()) for record in caplog.records] == [("lazyshard", "lazyshard: told")]


def test_lines_of_the_library_are_seen_once(capsys: pytest.CaptureFixture[str]) -> None:
    with clean() as logger:
        parallel.attend()
        parallel.attend()
        logger.warning("rank %d of %d: waiting", 1, 2)
        assert capsys.readouterr().err == "[WARNING:lazyshard] rank 1 of 2: waiting\n"
        # A handler that ms-swift gives to the root logger later does not make it two.
        logging.getLogger().addHandler(logging.StreamHandler(sys.stderr))
        logger.warning("waiting")
        assert capsys.readouterr().err == "[WARNING:lazyshard] waiting\n"


@pytest.mark.parametrize("name", ["lazyshard", None])
def test_logging_that_the_program_has_set_up_stays_so(capsys: pytest.CaptureFixture[str], name: str | None) -> None:
    with clean() as logger:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter("own %(message)s"))
        logging.getLogger(name).addHandler(handler)
        before = logger.handlers[:]
        parallel.attend()
        logger.warning("waiting")
        assert capsys.readouterr().err == "own waiting\n"
        assert (logger.handlers, logger.propagate) == (before, True)
