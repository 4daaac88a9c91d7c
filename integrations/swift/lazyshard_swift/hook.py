"""Extends modules of ms-swift as they are imported; in every process from the start, by `lazyshard_swift.pth`.

Each start of the interpreter imports the package, whose stand-in in `sys.meta_path` calls `install` once something
named swift is looked for: to import this module each time would take twice as long (`scripts/bench startup`). The
`Finder` has a module go through the extension's `extend(module)` once its own code has run; not one imported before.
"""

import sys
from _thread import get_ident

TYPE_CHECKING = False
"""As type checkers take it. The name in `typing` would cost the import of `typing`."""

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Any

MARK = "lazyshard_swift"
"""The attribute, True, by which the finder and its stand-in are known."""

EXTENSIONS: "dict[str, str]" = {
    "swift.cli.main": "lazyshard_swift.commands",
    "swift.cli.utils": "lazyshard_swift.commands",
    "swift.arguments.base_args.data_args": "lazyshard_swift.arguments",
    "swift.pipelines.train.sft": "lazyshard_swift.commands",
    "swift.megatron.trainers.base": "lazyshard_swift.trainers",
    "swift.trainers.mixin": "lazyshard_swift.trainers",
}


class Finder:
    """Finds the modules that are to be extended, given with the name of the extension, through all other finders."""

    __slots__ = ("_searches", "extensions")

    lazyshard_swift = True

    def __init__(self, extensions: "Mapping[str, str]") -> None:
        self.extensions = extensions
        # Which thread searches for what: another finder may ask all finders too, and must not get back to here.
        self._searches: set[tuple[int, str]] = set()

    def find_spec(
        self, name: str, path: "Sequence[str] | None" = None, target: "ModuleType | None" = None
    ) -> "ModuleSpec | None":
        """Returns the specification of a module that is to be extended, None for all others."""
        if name not in self.extensions or (search := (get_ident(), name)) in self._searches:
            return None
        self._searches.add(search)
        try:
            for finder in tuple(sys.meta_path):
                find = getattr(finder, "find_spec", None)
                spec: ModuleSpec | None = find(name, path, target) if find is not None else None
                if spec is not None:
                    # Of a class, which loads what is built in, all modules would be extended.
                    if hasattr(spec.loader, "exec_module") and type(getattr(spec.loader, "__dict__", None)) is dict:
                        _extend_after(spec.loader, name, self.extensions[name])
                    return spec
        finally:
            self._searches.discard(search)
        return None


def _extend_after(loader: "Any", name: str, extension: str) -> None:
    """Has a loader run the extension after a module's own code, once; of the extension nothing is raised."""

    def exec_module(module: "ModuleType") -> None:
        vars(loader).pop("exec_module", None)
        loader.exec_module(module)
        if module.__name__ != name:
            return
        try:
            from lazyshard_swift.ms_swift import extend

            extend(module, extension)
        except Exception:  # noqa: S110
            # `extend` reports what fails. This is for a package that is being replaced or removed meanwhile.
            pass

    vars(loader)["exec_module"] = exec_module


def active() -> bool:
    """Says whether the finder, or the stand-in for it, is in place in this interpreter."""
    return any(getattr(finder, MARK, None) is True for finder in sys.meta_path)


def install() -> None:
    """Puts the finder in the place of the stand-in, or in the first one; once is enough."""
    # By name: this module may have been imported a second time, and two finders would extend twice.
    if any(type(finder).__module__ == __name__ for finder in sys.meta_path):
        return
    for place, finder in enumerate(sys.meta_path):
        if getattr(finder, MARK, None) is True:
            # The list keeps its length: an import in this or another thread is going through it.
            sys.meta_path[place] = Finder(EXTENSIONS)
            return
    sys.meta_path.insert(0, Finder(EXTENSIONS))
