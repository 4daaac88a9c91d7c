"""A followed directory's parts: names, the files that were read to their end, and when to look."""

import base64
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lazyshard_producer.following.listing import DirectoryWatch, FinishedFiles, NameRules
from lazyshard_producer.position import FilePosition

LINES = ("*.jsonl", "{name}.done", "_END")


@pytest.mark.parametrize(
    ("rules", "data", "others"),
    [
        (LINES, ["a.jsonl", "a.jsonl.gz", "a.jsonl.zst", "a.b.jsonl", "\udcff.jsonl", "a\nb.jsonl"], ["_END"]),
        (LINES, [], ["A.JSONL", "a.json", "a.jsonl.bz2", "a.jsonl.xz", ".a.jsonl", ".a.jsonl.x7Yq2", "a.jsonl.done"]),
        (LINES, [], ["a.jsonl.tmp", "a.jsonl.part", "a.jsonl~"]),
        (("*", "ok-{name}", "STOP"), ["a", "a.gz", "ok-"], ["ok-a", "STOP", "a.tmp", ".a"]),
        (("part-[0-9]*.json.gz", "{name}.done", "_END"), ["part-1.json.gz"], ["part-1.json", "part-x.json.gz"]),
        (("*", "_SUCCESS", "_END"), ["a"], ["_SUCCESS"]),
    ],
)
def test_names_of_data(rules: tuple[str, str, str], data: list[str], others: list[str]) -> None:
    assert [name for name in (*data, *others) if NameRules(*rules).is_data(name)] == data


def finished(size: int, line: int, tail: int, open_end: bool) -> FilePosition:
    return FilePosition(size, line, open_end=open_end, seen=size, tail=f"{tail:016x}")


FILES = st.dictionaries(
    st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0/"), min_size=1, max_size=3),
    st.builds(finished, st.integers(0, 2**62), st.integers(0, 2**40), st.integers(0, 2**64 - 1), st.booleans()),
)


@given(FILES, FILES, FILES, st.integers(1, 5))
def test_finished_files_are_a_dict_in_little_space(
    first: dict[str, FilePosition], second: dict[str, FilePosition], sizes: dict[str, FilePosition], merge: int
) -> None:
    files = FinishedFiles()
    for name, file in first.items():
        files.add(name, file, file.offset)
    copy = FinishedFiles.decode(files.encode())
    shared = copy.copy()
    for at, (name, file) in enumerate(second.items()):
        copy.add(name, file, file.offset)
        if at % merge == 0:
            names = base64.b64decode(copy.encode()["name"])
            assert len(names) == 8 * len(first | dict(list(second.items())[: at + 1]))
    both = first | second
    for name in first | second | sizes:
        assert files.get(name) == shared.get(name) == first.get(name)
        assert copy.get(name) == both.get(name)
    unknown, grown = copy.compare({name: file.offset for name, file in sizes.items()})
    assert unknown == [name for name in sizes if name not in both]
    assert grown == [name for name in sizes if name in both and sizes[name].offset > both[name].offset]


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


@pytest.mark.parametrize(
    ("took", "changed", "rest"), [(0.0, False, 0.2), (0.5, True, 5.0)], ids=["lines came", "a look of half a second"]
)
def test_when_to_look_again(took: float, changed: bool, rest: float, tmp_path: Path) -> None:
    now = 100.0
    watch = DirectoryWatch(str(tmp_path), lambda: now)
    watch.look()
    now += took
    watch.looked(changed)
    watch.active()
    now += rest - 0.01
    assert not watch.due()
    now += 0.02
    assert watch.due()
