"""A followed directory's parts: names, the files that were read to their end, and when to look."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lazyshard_producer.following.directory import DirectoryWatch
from lazyshard_producer.following.listing import Finished, FinishedFiles, NameRules


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("a.jsonl", True),
        ("a.jsonl.gz", True),
        ("a.jsonl.zst", True),
        ("a.b.jsonl", True),
        ("\udcff.jsonl", True),
        ("a\nb.jsonl", True),
        ("A.JSONL", False),
        ("a.json", False),
        ("a.jsonl.bz2", False),
        (".a.jsonl", False),
        (".a.jsonl.x7Yq2", False),
        ("a.jsonl.tmp", False),
        ("a.jsonl.part", False),
        ("a.jsonl~", False),
        ("a.jsonl.done", False),
        ("_END", False),
    ],
)
def test_names_of_data(name: str, data: bool) -> None:
    assert NameRules("*.jsonl", "{name}.done", "_END").is_data(name) == data


def test_a_pattern_that_takes_all_leaves_markers_out() -> None:
    rules = NameRules("*", "ok-{name}", "STOP")
    assert [name for name in ("a", "a.gz", "ok-a", "ok-", "STOP", "a.tmp", ".a") if rules.is_data(name)] == [
        "a",
        "a.gz",
        "ok-",
    ]
    assert rules.marker_of("a") == "ok-a"
    assert (rules.data_of("ok-a"), rules.data_of("a"), rules.data_of("ok-")) == ("a", None, None)


def test_a_pattern_with_an_ending_of_its_own() -> None:
    rules = NameRules("part-[0-9]*.json.gz", "{name}.done", "_END")
    assert [rules.is_data(name) for name in ("part-1.json.gz", "part-1.json", "part-x.json.gz")] == [True, False, False]


def test_one_marker_says_so_of_all() -> None:
    rules = NameRules("*", "_SUCCESS", "_END")
    assert (rules.is_data("_SUCCESS"), rules.data_of("_SUCCESS"), rules.data_of("a")) == (False, "", None)


FILES = st.dictionaries(
    st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0/"), min_size=1, max_size=3),
    st.builds(Finished, st.integers(0, 2**62), st.integers(0, 2**40), st.integers(0, 2**64 - 1), st.booleans()),
)


@given(FILES, FILES, FILES, st.integers(1, 5))
def test_finished_files_are_a_dict_in_little_space(
    first: dict[str, Finished], second: dict[str, Finished], sizes: dict[str, Finished], merge: int
) -> None:
    files = FinishedFiles()
    for name, file in first.items():
        files.add(name, file)
    copy = FinishedFiles.decode(files.encode())
    shared = copy.copy()
    for at, (name, file) in enumerate(second.items()):
        copy.add(name, file)
        if at % merge == 0:
            assert len(copy) == len(first | dict(list(second.items())[: at + 1]))
    both = first | second
    for name in first | second | sizes:
        assert files.get(name) == shared.get(name) == first.get(name)
        assert copy.get(name) == both.get(name)
    unknown, grown = copy.compare({name: file.size for name, file in sizes.items()})
    assert unknown == [name for name in sizes if name not in both]
    assert grown == [name for name in sizes if name in both and sizes[name].size > both[name].size]


@pytest.mark.parametrize(
    "value",
    [None, {}, {"name": "", "size": "", "line": ""}, {"name": "AAAAAAAAAAA=", "size": "", "line": "", "tail": ""}, 3]
    + [dict.fromkeys(("name", "size", "line", "tail"), wrong) for wrong in ("x", "AAAA", "A" * 20 + "A=")],
)
def test_finished_files_that_are_none_are_refused(value: Any) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        FinishedFiles.decode(value)


def test_looks_become_rarer_while_nothing_changes(tmp_path: Path) -> None:
    now = 0.0
    watch = DirectoryWatch(str(tmp_path), lambda: now)
    looks = []
    for centisecond in range(1000):
        now = centisecond / 100
        if watch.due():
            looks.append(centisecond)
            watch.look()
            watch.looked(changed=now < 0.5)
    pauses = [after - before for before, after in pairwise(looks)]
    assert pauses == pytest.approx([20, 20, 20, 30, 45, 68, 102, 152, 200, 200], abs=1)
    now = 100.0
    watch.look()
    watch.looked(changed=False)
    watch.active()
    now = 100.19
    assert not watch.due()
    now = 100.21
    assert watch.due()


def test_a_look_that_takes_long_is_followed_by_ten_times_as_much_rest(tmp_path: Path) -> None:
    now = 0.0
    watch = DirectoryWatch(str(tmp_path), lambda: now)
    watch.look()
    now += 0.5
    watch.looked(changed=True)
    watch.active()
    now += 4.9
    assert not watch.due()
    now += 0.2
    assert watch.due()
