"""Imports point one way: producer and swift -> data -> stream -> store -> format -> errors, in functions as well."""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Final, NamedTuple

import pytest

ROOT: Final = Path(__file__).resolve().parents[2]
PACKAGES: Final = {
    "lazyshard": ROOT / "lazyshard",
    "lazyshard_producer": ROOT / "producer" / "lazyshard_producer",
    "lazyshard_swift": ROOT / "integrations" / "swift" / "lazyshard_swift",
}

COMMON: Final = {"part", "stream", "store", "format", "plan", "memory", "errors"}

MAY_IMPORT: Final[dict[str, set[str]]] = {  # besides itself
    "errors": set(),
    "lazy": set(),
    "memory": set(),
    "part": {"errors"},
    "format": {"part", "memory", "errors"},
    "plan": {"part", "errors"},
    "config": {"part", "lazy", "store", "errors"},
    "store": {"format", "memory", "errors"},
    "stream": {"part", "lazy", "store", "format", "plan", "memory", "errors"},
    "inspection": {"part", "stream", "store", "format", "plan", "memory", "errors"},
    "conversion": {"part", "store", "errors"},
    "data": {"part", "lazy", "stream", "store", "config", "format", "plan", "memory", "errors"},
    "filesystem": set(),
    "simulation": {"part", "stream", "format", "plan"},
    "facade": {"lazy", "data", "config", "inspection", "stream", "format", "plan", "errors"},
    "cli": COMMON | {"facade", "config", "filesystem", "simulation", "conversion", "inspection"},
    "producer": COMMON | {"facade", "cli", "conversion", "inspection", "lazy"},
    "swift": COMMON | {"facade", "data", "cli"},
}

LAYERS: Final = {f"lazyshard.{layer}": layer for layer in MAY_IMPORT if layer not in ("facade", "producer", "swift")}
LAYERS.update(lazyshard_producer="producer", lazyshard_swift="swift")
"""By package; the facade is lazyshard/__init__.py itself."""

PURE_LAYERS: Final = {"format", "part", "plan"}
NOT_PURE_MODULES: Final = {
    *("asyncio", "concurrent", "datetime", "fcntl", "filelock", "glob", "io", "logging", "mmap", "multiprocessing"),
    *("os", "pathlib", "random", "secrets", "select", "shutil", "signal", "socket", "subprocess", "tempfile"),
    *("threading", "time", "torch", "urllib", "uuid", "watchdog"),
}


class Module(NamedTuple):
    name: str
    is_package: bool
    tree: ast.Module


def imported(module: Module) -> Iterator[tuple[int, str, str | None]]:
    """Every import as (line, module, name taken from it or None), relative ones resolved."""
    package = module.name if module.is_package else module.name.rpartition(".")[0]
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name, None
        elif isinstance(node, ast.ImportFrom):
            source = node.module or ""
            if node.level:
                parents = package.split(".")
                base = ".".join(parents[: len(parents) - node.level + 1])
                source = f"{base}.{source}" if source else base
            for alias in node.names:
                yield node.lineno, source, alias.name
        elif isinstance(node, ast.Call) and node.args:
            called = ast.unparse(node.func).rpartition(".")[2]
            if called in {"import_module", "__import__"} and isinstance(node.args[0], ast.Constant):
                yield node.lineno, str(node.args[0].value), None


def layer_of(name: str) -> str | None:
    """The layer of a dotted name, None outside the project."""
    for prefix, layer in LAYERS.items():
        if layer != "facade" and (name == prefix or name.startswith(f"{prefix}.")):
            return layer
    return "facade" if name == "lazyshard" else "unknown" if name.startswith("lazyshard.") else None


def violations(module: Module) -> list[str]:
    own = layer_of(module.name)
    if own is None or own == "unknown":
        return [f"{module.name}: belongs to no layer; name its layer in LAYERS"]
    found = []
    for line, source, name in imported(module):
        where = f"{module.name}:{line}"
        target, shown = layer_of(source), source
        if target == "facade" and name is not None:
            if name in ("LazyShardedDataset", "streaming_shard"):  # Their home is lazyshard.data
                target, shown = "data", f"{source}.{name}"
            elif layer_of(f"lazyshard.{name}") != "unknown":  # `from lazyshard import stream` is lazyshard.stream
                target, shown = layer_of(f"lazyshard.{name}"), f"{source}.{name}"
        if target is not None and target != own and target not in MAY_IMPORT[own]:
            found.append(f"{where}: {own} may not import {target} ({shown})")
        top = source.partition(".")[0]
        if top == "torch" and own not in ("data", "swift"):
            found.append(f"{where}: {own} may not import torch")
        elif top == "swift" and own != "swift":
            found.append(f"{where}: {own} may not import ms-swift")
        elif top in NOT_PURE_MODULES and own in PURE_LAYERS:
            found.append(f"{where}: {own} is pure and may not import {top}")
    if own in PURE_LAYERS:
        for node in ast.walk(module.tree):
            called = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
            if isinstance(node, ast.Call) and called in ("input", "open", "print"):
                found.append(f"{module.name}:{node.lineno}: {own} is pure and may not call {called}()")
    return found


@cache
def modules_of(package: str, folder: Path) -> list[Module]:
    found = []
    for path in sorted(folder.rglob("*.py")):
        parts = [package, *path.relative_to(folder).with_suffix("").parts]
        is_package = parts[-1] == "__init__"
        name = ".".join(parts[:-1] if is_package else parts)
        found.append(Module(name, is_package, ast.parse(path.read_text(encoding="utf-8"))))
    return found


@pytest.mark.parametrize("package", PACKAGES)
def test_imports_point_one_way(package: str) -> None:
    modules = modules_of(package, PACKAGES[package])
    assert [line for module in modules for line in violations(module)] == []
    prefix = package.removeprefix("lazyshard_") if package != "lazyshard" else ""  # Every layer has sources
    wanted = {prefix} if prefix else set(MAY_IMPORT) - {"producer", "swift"}
    assert {layer_of(module.name) for module in modules} == wanted


@pytest.mark.parametrize(
    ("name", "source", "expected"),
    [
        ("lazyshard.format.seal", "import lazyshard", "format may not import facade"),
        ("lazyshard.plan.deal", "from ..format import seal", "plan may not import format"),
        ("lazyshard.plan.deal", "def f():\n    import time", "plan is pure and may not import time"),
        ("lazyshard.format.records", "open('x')", "format is pure and may not call open()"),
        ("lazyshard.stream.writer", "import torch.utils.data", "stream may not import torch"),
        ("lazyshard.stream.writer", "import importlib\nimportlib.import_module('lazyshard.cli')", "may not import cli"),
        ("lazyshard.stream.writer", "import lazyshard.extras", "stream may not import unknown"),
        ("lazyshard.data.dataset", "import swift.dataloader", "data may not import ms-swift"),
        ("lazyshard_producer.cli", "from lazyshard import LazyShardedDataset", "producer may not import data"),
        ("lazyshard_swift.hook", "if TYPE_CHECKING:\n    import lazyshard_producer", "swift may not import producer"),
        ("lazyshard.extras", "", "belongs to no layer"),
    ],
)
def test_a_bad_source_is_found(name: str, source: str, expected: str) -> None:
    [found] = violations(Module(name, name.count(".") == 0, ast.parse(source)))
    assert expected in found


PACKAGE: Final = "lazyshard_producer"

ORDER: Final = (
    {"errors", "position", "stop"},
    {"configuration"},
    {"sources"},
    {"following"},
    {"opening"},
    {"rows", "limits", "display"},
    {"shipping", "writers"},
    {"loop", "ray_pieces"},
    {"ray"},
)


def rank(name: str) -> int:
    return next((at for at, names in enumerate(ORDER) if name in names), len(ORDER))


def parts_imported(module: Module) -> Iterator[str]:
    for _, source, name in imported(module):
        package, _, part = source.partition(".")
        if package == PACKAGE:
            yield part.partition(".")[0] or name or ""


def test_imports_within_the_producer_point_one_way() -> None:
    found = []
    for module in modules_of(PACKAGE, PACKAGES[PACKAGE]):
        own = module.name.removeprefix(f"{PACKAGE}.").partition(".")[0]
        for name in parts_imported(module):
            beside = rank(name) == rank(own) and own in {"rows", "limits", "display"}
            if name != own and (rank(name) > rank(own) or beside):
                found.append(f"{module.name} may not import {name}")
    assert found == []
    there = {path.stem for path in PACKAGES[PACKAGE].iterdir()}
    assert [name for names in ORDER for name in sorted(names) if name not in there] == []
