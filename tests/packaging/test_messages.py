"""The wording of all messages stands in one file, and what tests assert elsewhere is no wording."""

from tests.packaging.messages import GOLDEN, collect


def test_every_message_stands_in_the_golden_file() -> None:
    # After a message was changed: .venv/bin/python -m tests.packaging.messages, and look at the difference.
    assert collect() == GOLDEN.read_text(encoding="utf-8")
