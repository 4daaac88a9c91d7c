"""Packages in the place of ms-swift and of the extensions, for `programs.python` to import."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

from lazyshard_swift.ms_swift import HookPoint
from tests.swift.programs import ROOT

PTH: Final = ROOT / "integrations" / "swift" / "lazyshard_swift.pth"


def write(path: Path, text: str = "") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def make_packages(folder: Path, modules: Iterable[str], text: str = "") -> Path:
    """Writes the modules, and the packages that hold them, and returns the folder."""
    for module in modules:
        parts = module.split(".")
        for depth in range(1, len(parts)):
            package = folder.joinpath(*parts[:depth], "__init__.py")
            if not package.exists():
                write(package)
        write(folder.joinpath(*parts).with_suffix(".py"), text)
    return folder


def sources(points: Iterable[HookPoint]) -> Iterator[tuple[str, str]]:
    """Yields each module with a source that has all of its hook points."""
    points = list(points)
    for module in dict.fromkeys(point.module for point in points):
        here = [point for point in points if point.module == module]
        lines = [f"from elsewhere import {point.name}" for point in here if point.parameters is None]
        lines += [f"def use_{point.name}():\n    {point.name}()" for point in here if point.parameters is None]
        for owner in dict.fromkeys(point.owner for point in here if point.parameters is not None):
            indent = "    " if owner else ""
            lines += [f"class {owner}:"] if owner else []
            for point in here:
                if point.owner == owner and point.parameters is not None:
                    lines.append(f"{indent}def {point.name}({', '.join(point.parameters)}):\n{indent}    pass")
        yield module, "\n".join(lines) + "\n"


def make_swift(folder: Path, points: Iterable[HookPoint], version: str = "4.6.0") -> Path:
    """Writes a package `swift` that has all the hook points, without metadata, and returns its folder."""
    for module, text in sources(points):
        make_packages(folder, [module], text)
    write(folder / "swift" / "version.py", f"__version__ = '{version}'\n")
    return folder / "swift"


def package_folder() -> Path:
    """The folder that holds `lazyshard_swift`, wherever it is installed."""
    import lazyshard_swift

    return Path(lazyshard_swift.__path__[0]).parent
