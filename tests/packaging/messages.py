"""The wording of every message of the product, collected from its sources; `tests/messages.txt` holds it.

    .venv/bin/python -m tests.packaging.messages        writes that file anew, for a look at the difference

Tests elsewhere assert classes, fields and exit codes: a message is changed here and in the source, and in no test.
"""

import ast
import builtins
import inspect
import re
from collections import Counter
from collections.abc import Iterator
from typing import Final

import typer

import lazyshard.errors
import lazyshard_producer.errors
import lazyshard_swift.errors
from tests.packaging.test_import_directions import PACKAGES, ROOT

GOLDEN: Final = ROOT / "tests" / "messages.txt"

LOGGED: Final = "logged"  # What lines stand under that are logged or printed and end nothing

ERRORS: Final = {
    name: one
    for module in (builtins, lazyshard.errors, lazyshard_producer.errors, lazyshard_swift.errors, typer)
    for name, one in inspect.getmembers(module, inspect.isclass)
    if issubclass(one, Exception) and name[0] != "_"
}

OTHER: Final = "parts"  # What texts stand under that are neither: parts of messages, lines of reports, help

HOLE: Final = "{}"

_TELLERS: Final = frozenset({"warning", "info", "warn", "_warn", "tell", "_tell", "warn_once", "_warn_once", "notice"})


def words(node: ast.expr) -> str | None:
    """Returns the text of an expression, with holes for what comes in; None where it is no text."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return re.sub(r"%[-.\d]*[a-z]", HOLE, node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else HOLE for part in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        left, right = words(node.left), words(node.right)
        return None if left is None and right is None else (left or HOLE) + (right or HOLE)
    return None


def sources() -> Iterator[ast.Module]:
    for folder in PACKAGES.values():
        for path in sorted(folder.rglob("*.py")):
            yield Inlined().visit(ast.parse(path.read_text(encoding="utf-8")))


class Inlined(ast.NodeTransformer):  # Puts a text that a function names once into the texts that it is a part of
    def __init__(self) -> None:
        self._named: dict[str, ast.expr] = {}

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        outer, nodes = self._named, list(ast.walk(node))
        stored = Counter(one.id for one in nodes if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store))
        set_to = [(one.targets[0], one.value) for one in nodes if isinstance(one, ast.Assign)]
        pairs = [(name.id, value) for name, value in set_to if isinstance(name, ast.Name) and stored[name.id] == 1]
        self._named = {name: value for name, value in pairs if words(value) is not None}
        found = self.generic_visit(node)
        self._named = outer
        return found

    def visit_Assign(self, node: ast.Assign) -> ast.AST | None:
        first = node.targets[0]
        return None if isinstance(first, ast.Name) and first.id in self._named else self.generic_visit(node)

    def visit_Name(self, node: ast.Name) -> ast.AST:
        named = self._named.get(node.id)
        return node if named is None or not isinstance(node.ctx, ast.Load) else self.generic_visit(named)

    def visit_JoinedStr(self, node: ast.JoinedStr) -> ast.AST:
        self.generic_visit(node)
        values: list[ast.expr] = []
        for part in node.values:
            inner = part.value if isinstance(part, ast.FormattedValue) else part
            values += inner.values if isinstance(inner, ast.JoinedStr) else [inner if words(inner) else part]
        node.values = values
        return node


def errors_made(tree: ast.Module) -> Iterator[tuple[str, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = _name(node)
            text = words(node.args[0]) if name in ERRORS and node.args else None
            if text is not None and _is_sentence(text):
                yield name, text


def lines_logged(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and _name(node) in _TELLERS:
            longest = max(filter(None, map(words, node.args)), key=len, default="")  # Its key may stand before the line
            if _is_sentence(longest):
                yield longest


def texts(tree: ast.Module) -> Iterator[str]:
    """All sentences of a module, and what leads to a name or number, but its docstrings."""
    nodes: list[ast.AST] = [tree]
    while nodes:
        node = nodes.pop()
        text = words(node) if isinstance(node, ast.expr) else None
        if text is not None:
            if len(re.findall(r"[a-z]{2,}", text)) >= 3 or re.search(r"[a-z]{2,}:? (\{\}|$)", text):
                yield text
            # Of a text with holes, what comes in may be texts too.
            nodes += [part.value for part in getattr(node, "values", ()) if isinstance(part, ast.FormattedValue)]
        elif not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)):
            nodes += ast.iter_child_nodes(node)


def collect() -> str:
    found: dict[str, set[str]] = {}
    for tree in sources():
        for name, text in errors_made(tree):
            found.setdefault(name, set()).add(text)
        found.setdefault(LOGGED, set()).update(lines_logged(tree))
        found.setdefault(OTHER, set()).update(texts(tree))
    found[OTHER] -= set().union(*(lines for name, lines in found.items() if name != OTHER))
    parts = [
        "\n".join([name, *("  " + text.replace("\n", "\\n") for text in sorted(found[name]))]) for name in sorted(found)
    ]
    return "\n\n".join(parts) + "\n"


def read_golden() -> dict[str, list[str]]:
    parts = GOLDEN.read_text(encoding="utf-8").rstrip("\n").split("\n\n")
    return {name: [line[2:] for line in lines] for name, *lines in (part.split("\n") for part in parts)}


def _name(call: ast.Call) -> str:
    return str(getattr(call.func, "attr", getattr(call.func, "id", "")))


def _is_sentence(text: str) -> bool:
    return len(re.findall(r"[a-z]{2,}", text)) >= 2


if __name__ == "__main__":
    GOLDEN.write_text(collect(), encoding="utf-8")
