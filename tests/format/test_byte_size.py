"""Sizes as people write them, in flags and in Python."""

from __future__ import annotations

import pytest

from lazyshard.format.fields import parse_size


@pytest.mark.parametrize(
    ("text", "size"),
    [("1", 1), ("20GB", 20 * 10**9), ("20 gb", 20 * 10**9), ("1.5MiB", 3 << 19), ("64k", 64_000), ("2Ti", 2 << 40)],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "0", "-1", "GB", "1e9", "20 GB more", "0.0001", "1PB", "٣GB"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(ValueError, match="expected a number of bytes such as 20GB or 512MiB"):
        parse_size(text)
