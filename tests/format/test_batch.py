"""Lines checked together come out as they do one by one."""

from __future__ import annotations

import json
import pickle
from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from lazyshard.errors import RowInvalid
from lazyshard.format import batch
from lazyshard.format.batch import CheckedLines, check_lines
from lazyshard.format.row import check_line, has_duplicate_keys
from tests.format.test_row import ACCEPTED, REFUSED


def one_by_one(lines: list[bytes]) -> tuple[list[bytes], list[int], str | None]:
    """The rows, those that name a key twice, and the refusal: what `check_line` says of each line."""
    rows: list[bytes] = []
    duplicates: list[int] = []
    for index, line in enumerate(lines):
        try:
            row, parsed = check_line(line)
        except RowInvalid as refused:
            return rows, duplicates, f"{index}: {refused}"
        if has_duplicate_keys(row, parsed):
            duplicates.append(index)
        rows.append(row)
    return rows, duplicates, None


def check_same(lines: list[bytes]) -> CheckedLines:
    """Checks lines together and compares with one by one."""
    rows, duplicates, refused = one_by_one(lines)
    found = check_lines(lines)
    assert found.data == b"".join(rows)
    assert len(found) == len(rows)
    assert found.ends.tolist() == [len(b"".join(rows[: number + 1])) for number in range(len(rows))]
    assert found.digests.tolist() == [xxhash.xxh3_64_intdigest(row) for row in rows]
    assert found.ends.dtype == found.digests.dtype == np.uint64
    assert list(found.duplicates) == duplicates
    assert (f"{found.refused.index}: {found.refused}" if found.refused else None) == refused
    return found


GOOD = b'{"id":1,"messages":[{"role":"user","content":"a: \\"b\\": c"}]}\n'

ODD = [
    *(line for line, _, _ in REFUSED if len(line) < 100),
    *(line for line, _ in ACCEPTED),
    b'{"a":1}\n\n',
    b'{"a":1}\r\r\n\n',
    b'{"a":\t1}\n',
    b'{"a":\r1}\n',
    b'{"a":\n1}\n',
    b'{"a"\t :1,"a":2}\n',
    b'{"a" :1,"b"  :2}\n',
    b'{"a":"x :y \\" : \\":"}\n',
    b'{"a":{"b":{"c":1}},"d":[[{"e":1}],{"f":{"g":1}}]}\n',
    b'{"a":[{"b":[{"c":1,"c":1}]}]}\n',
    b'{"\\u003a":1,"a":":"}\n',
    b'{"a\\"":1,"a\\u0022":2}\n',
    b'{"a":9223372036854775807,"b":-9223372036854775808,"c":18446744073709551615}\n',
    b'{"a":18446744073709551616}\n',
    b'{"a":-9223372036854775809}\n',
    b'{"a":1e300,"b":12345678901234567890.5}\n',
    b'{"a":NaN}\n',
    b'{"a":"\\ud800"}\n',
    b'{"a":' * 2000 + b"1" + b"}" * 2000 + b"\n",
]


@pytest.mark.parametrize("odd", ODD)
@pytest.mark.parametrize("place", [0, 31, 32, 69])
def test_odd_line_among_others_is_taken_as_alone(odd: bytes, place: int) -> None:
    lines = [GOOD] * 70
    lines[place] = odd
    check_same(lines)


@given(lines=st.lists(st.sampled_from([GOOD, *ODD]), max_size=12), group=st.sampled_from([1, 2, 3, 32]))
def test_any_lines_come_out_as_one_by_one(lines: list[bytes], group: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batch, "_GROUP", group)
        check_same(lines)


TEXT = st.text(alphabet='ab:"\\\u003a \n09', max_size=12)
VALUES = st.recursive(
    st.one_of(st.integers(-(2**66), 2**66), TEXT, st.none(), st.floats(allow_nan=False, allow_infinity=False)),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=8,
)


@given(
    rows=st.lists(st.dictionaries(TEXT, VALUES, max_size=4), max_size=8),
    separators=st.sampled_from([(",", ":"), (", ", ": "), (" ,\t", " : ")]),
    end=st.sampled_from(["\n", "\r\n"]),
)
def test_generated_rows_come_out_as_one_by_one(
    rows: list[dict[str, Any]], separators: tuple[str, str], end: str
) -> None:
    check_same([(json.dumps(row, separators=separators) + end).encode() for row in rows])


@given(shift=st.integers(0, 20), digits=st.integers(15, 25), sign=st.sampled_from(["", "-"]), dot=st.booleans())
def test_long_number_is_found_wherever_it_lies(shift: int, digits: int, sign: str, dot: bool) -> None:
    number = f"{sign}{'9876543210' * 3}"[: digits + len(sign)] + (".5" if dot else "")
    lines = [b'{"a":"' + b"x" * shift + b'"}\n', b'{"b":' + number.encode() + b"}\n", b"{}\n"]
    check_same(lines)


@pytest.mark.parametrize("before", [0, 1, 7, 8, 15])
def test_long_number_across_windows_is_found(before: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch, "_WINDOW_BYTES", 64)
    for length in range(30, 80):
        line = b'{"a":"' + b"x" * length + b'","b":' + b"9" * 20 + b"}\n"
        assert check_same([b'{"c":"' + b"y" * before + b'"}\n', line]).refused is not None


def test_checked_lines_are_those_before_the_first_refusal_and_survive_the_way_out_of_a_worker() -> None:
    assert len(check_same([])) == 0
    # The first, though another one is refused for a reason that is seen sooner.
    found = check_same([GOOD] * 40 + [b'{"a":18446744073709551616}\n'] + [GOOD] * 40 + [b"{\n"])
    assert found.refused is not None and found.refused.index == 40
    found = check_lines([GOOD, b'{"a":1,"a":2}\n', b"{"])
    again = pickle.loads(pickle.dumps(found))
    assert (again.data, again.duplicates, again.refused.index) == (found.data, (1,), 2)
    assert again.digests.tolist() == found.digests.tolist()
