"""Packages in the place of ms-swift and of the extensions, for `programs.python` to import."""

from collections.abc import Iterable
from pathlib import Path
from typing import Final

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


def package_folder() -> Path:
    """The folder that holds `lazyshard_swift`, wherever it is installed."""
    import lazyshard_swift

    return Path(lazyshard_swift.__path__[0]).parent
