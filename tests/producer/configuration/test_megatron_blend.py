"""Blend files: as Megatron Core takes them, and what is none."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lazyshard_producer.configuration.source_paths import parse_blend
from tests.conversion import megatron_core


@pytest.mark.parametrize(
    ("text", "entries"),
    [
        ("a", [("a", None)]),
        ("0.7 web/a\n 0.3\tb", [("web/a", 0.7), ("b", 0.3)]),
        ("a b c", [("a", None), ("b", None), ("c", None)]),
        # An odd number of words are prefixes, whatever they look like.
        ("1 2 3", [("1", None), ("2", None), ("3", None)]),
        ("a 1", [("a", None), ("1", None)]),
        ('["30", "a", "70", " b "]', [("a", 30.0), ("b", 70.0)]),
        ('[30, "a", 70.5, "b c"]', [("a", 30.0), ("b c", 70.5)]),
        ('{"train": "1 a 2 b", "valid": []}', [("a", 1.0), ("b", 2.0)]),
        ('\ufeff{"train": ["a"]}', [("a", None)]),
    ],
)
def test_forms(text: str, entries: list[tuple[str, float | None]]) -> None:
    assert parse_blend(text.encode()) == entries


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "weights and prefixes are needed, such as 0.7 data/web 0.3 data/code, got none"),
        (b"[]", "weights and prefixes are needed"),
        (b"\xff\xfe", "got bytes that are no UTF-8"),
        (b"1 a b c", "a number above 0 is needed as each weight, where others are numbers, got 'b'"),
        (b"1 a 0 b", "got '0'; for no rows of a data set leave it out"),
        (b"1 a -1 b", "got '-1'"),
        (b"nan a 1 b", "got 'nan'"),
        (b"inf a 1 b", "got 'inf'"),
        (b"[1, ", "a blend in JSON is needed, got something that is none"),
        (b'{"valid": ["a"]}', "a blend under \"train\" is needed, got 'valid'"),
        (b"[[1], 2]", "a list of weights and prefixes is needed"),
        (b'[true, "a"]', "a list of weights and prefixes is needed"),
        (b'["1", ""]', "prefixes are needed, got an empty one"),
    ],
)
def test_what_is_none(data: bytes, says: str) -> None:
    with pytest.raises(ValueError, match=re.escape(says)):
        parse_blend(data)


@given(st.lists(st.sampled_from(["a", "b/c", "1", "0.5", "2e3", "7x"]), min_size=1, max_size=8))
def test_as_megatron_core_takes_them(words: list[str]) -> None:
    megatron_core.module()
    from megatron.core.datasets.utils import get_blend_from_list

    text = " ".join(words).encode()
    if len(words) % 2 == 0 and len({word in ("1", "0.5", "2e3") for word in words[::2]}) == 2:
        # Refused there too, but for some orders: what it asserts reads an iterator that was read before.
        with pytest.raises(ValueError, match="a number above 0 is needed"):
            parse_blend(text)
        return
    prefixes, weights = get_blend_from_list(words)
    expected = [(prefix, None if weights is None else weights[at]) for at, prefix in enumerate(prefixes)]
    assert parse_blend(text) == expected
