"""Data for the demo from every machine: the functions and classes of the Python standard library.

Each becomes a question and an answer (its signature, with its docstring or the beginning of its source). Sources are
only parsed, not imported. For one Python version the rows and their order are always the same.
"""

from __future__ import annotations

import ast
import json
import os
import random
import statistics
import sysconfig
import tokenize
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

SKIPPED: Final = frozenset({"test", "tests", "idle_test", "idlelib", "turtledemo", "site-packages", "dist-packages"})
"""Folders that are not part of the library itself, or have uninformative names."""

SOURCE_LINES: Final = 12
"""Lines of source used in place of a docstring."""

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


class Entry(NamedTuple):
    """A function or class: its dotted name, its kind ("function", "method", "class"), and what is said of it."""

    name: str
    kind: str
    answer: str


class Corpus(NamedTuple):
    """What was written: number of samples, and the shortest, median and longest line in bytes."""

    samples: int
    shortest: int
    median: int
    longest: int


def modules(library: Path) -> Iterator[tuple[str, Path]]:
    """Yields dotted name and path of every module below a folder, in the order of the paths."""
    for folder, below, files in os.walk(library):
        below[:] = sorted(name for name in below if name.isidentifier() and name not in SKIPPED)
        for file in sorted(files):
            path = Path(folder, file)
            parts = path.relative_to(library).with_suffix("").parts
            if path.suffix == ".py":
                yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), path


def entries(module: str, source: str) -> Iterator[Entry]:
    """Yields the functions, classes and methods of a module's source, but none inside a function.

    Raises:
        SyntaxError, ValueError: it is no Python.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tree = ast.parse(source)
    # ast's own get_source_segment splits the whole source anew for every definition.
    lines = source.splitlines()
    yield from _definitions(tree, module, "function", lines)


def _definitions(parent: ast.AST, prefix: str, kind: str, lines: list[str]) -> Iterator[Entry]:
    for node in ast.iter_child_nodes(parent):
        if isinstance(node, Definition):
            name = f"{prefix}.{node.name}"
            is_class = isinstance(node, ast.ClassDef)
            yield Entry(name, "class" if is_class else kind, _answer(name, node, lines))
            if is_class:
                yield from _definitions(node, name, "method", lines)
        elif isinstance(node, ast.If | ast.Try | ast.ExceptHandler | ast.With):
            yield from _definitions(node, prefix, kind, lines)


def _answer(name: str, node: Definition, lines: list[str]) -> str:
    said = ast.get_docstring(node)
    if not said:
        stop = min(node.end_lineno or node.lineno, node.lineno - 1 + SOURCE_LINES)
        said = "\n".join(lines[node.lineno - 1 : stop])
    return f"{signature(name, node)}\n\n{said}"


def signature(name: str, node: Definition) -> str:
    """Returns the head of a definition under its dotted name.

    >>> signature("m.f", ast.parse("def f(a, *, b=1) -> int: ...").body[0])
    'm.f(a, *, b=1) -> int'
    """
    if isinstance(node, ast.ClassDef):
        return f"class {name}({', '.join(map(ast.unparse, node.bases))})"
    start = "async " if isinstance(node, ast.AsyncFunctionDef) else ""
    returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    return f"{start}{name}({ast.unparse(node.args)}){returns}"


def row(number: int, entry: Entry) -> dict[str, Any]:
    """Returns an entry as a sample in the form that ms-swift trains on."""
    question = f"What is the class {entry.name} for?"
    if entry.kind != "class":
        question = f"What does the {entry.kind} {entry.name} do?"
    # A docstring may hold half of a surrogate pair, which is no UTF-8.
    answer = entry.answer.encode("utf-8", "replace").decode()
    messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return {"id": number, "source": entry.name, "messages": messages}


def collect(library: Path) -> list[Entry]:
    """Returns every function and class of the modules below a folder, the first of each name, in order."""
    found: dict[str, Entry] = {}
    for module, path in modules(library):
        try:
            with tokenize.open(path) as file:
                source = file.read()
            for entry in entries(module, source):
                found.setdefault(entry.name, entry)
        except (OSError, SyntaxError, ValueError):
            continue  # a template, a broken link, ...: the others suffice
    return list(found.values())


def write_corpus(path: Path, limit: int) -> Corpus:
    """Writes at most `limit` samples as JSON lines, their ids counted from 0.

    Their order is shuffled with a fixed seed, to mix lengths and modules.
    """
    chosen = collect(Path(sysconfig.get_paths()["stdlib"]))
    random.Random(0).shuffle(chosen)
    sizes = []
    with path.open("wb") as file:
        for number, entry in enumerate(chosen[:limit]):
            sizes.append(file.write(json.dumps(row(number, entry), ensure_ascii=False).encode() + b"\n"))
    if not sizes:
        return Corpus(0, 0, 0, 0)
    return Corpus(len(sizes), min(sizes), round(statistics.median(sizes)), max(sizes))
