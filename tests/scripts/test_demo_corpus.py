"""The demo's data: what is taken from a module, and the rows that come of it."""

import json
import sysconfig
from pathlib import Path

from scripts.demonstration.demo_corpus import Entry, collect, entries, modules, row, write_corpus

SOURCE = '''
import nothing_that_exists

if nothing_that_exists:
    def guarded(a, /, b: int = 1, *rest, key, **more) -> str:
        """Says it.

        At length.
        """

async def bare(x):
    def inner(): ...
    return x

class Thing(Base, metaclass=Meta):
    """Is one."""

    def method(self): return 1
'''


def test_entries_are_named_signed_and_explained() -> None:
    assert list(entries("pkg.mod", SOURCE)) == [
        Entry(
            "pkg.mod.guarded",
            "function",
            "pkg.mod.guarded(a, /, b: int=1, *rest, key, **more) -> str\n\nSays it.\n\nAt length.",
        ),
        Entry(
            "pkg.mod.bare",
            "function",
            "async pkg.mod.bare(x)\n\nasync def bare(x):\n    def inner(): ...\n    return x",
        ),
        Entry("pkg.mod.Thing", "class", "class pkg.mod.Thing(Base)\n\nIs one."),
        Entry("pkg.mod.Thing.method", "method", "pkg.mod.Thing.method(self)\n\n    def method(self): return 1"),
    ]


def test_an_undocumented_function_shows_no_more_than_its_first_lines() -> None:
    source = "def f():\n" + "".join(f"    x = {n}\n" for n in range(50))
    (entry,) = entries("m", source)
    assert entry.answer.splitlines()[-1] == "    x = 10"


def test_modules_leave_out_tests_and_foreign_packages(tmp_path: Path) -> None:
    for name in ("b.py", "a/__init__.py", "a/c.py", "test/t.py", "site-packages/s.py", "a/tests/u.py", "config-3/v.py"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    assert [name for name, _ in modules(tmp_path)] == ["b", "a", "a.c"]


def test_collect_keeps_the_first_of_a_name_and_passes_over_what_is_no_python(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("def f():\n    'first'\ndef f():\n    'second'\n")
    (tmp_path / "b.py").write_text("this is {{ a template }}")
    (tmp_path / "c.py").write_bytes(b"\xff\xfe")
    assert collect(tmp_path) == [Entry("a.f", "function", "a.f()\n\nfirst")]


def test_row_holds_a_conversation_in_valid_utf_8() -> None:
    assert row(7, Entry("m.C", "class", "half a pair: \ud800")) == {
        "id": 7,
        "source": "m.C",
        "messages": [
            {"role": "user", "content": "What is the class m.C for?"},
            {"role": "assistant", "content": "half a pair: ?"},
        ],
    }


def test_corpus_is_large_numbered_and_the_same_every_time(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    corpus = write_corpus(first, 10_001)
    assert corpus.samples == 10_001, sysconfig.get_paths()["stdlib"]
    assert corpus == write_corpus(second, 10_001)
    assert first.read_bytes() == second.read_bytes()
    rows = [json.loads(line) for line in first.read_bytes().splitlines()]
    assert [row["id"] for row in rows] == list(range(10_001))
    assert len({row["source"] for row in rows}) == 10_001
    assert corpus.shortest * 10 < corpus.longest
