"""Extends modules of ms-swift as they are imported, in every process from its start, by `lazyshard_swift.pth`.

Each start of the interpreter imports only the package, whose finder calls `find_spec` once a module named swift is
imported: importing this module each time would take twice as long (`scripts/bench startup`). After the code of a module
has run, the extension's `extend(module)` is called; a module that was imported before is not extended.
"""

import sys
from _thread import get_ident

TYPE_CHECKING = False
"""As in `typing`, whose import would take too long; type checkers treat it as true."""

if TYPE_CHECKING:
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Any

EXTENSIONS: "dict[str, str]" = {
    "swift.cli.main": "lazyshard_swift.commands",
    "swift.cli.utils": "lazyshard_swift.commands",
    "swift.arguments.base_args.data_args": "lazyshard_swift.arguments",
    "swift.pipelines.train.kto": "lazyshard_swift.commands",
    "swift.pipelines.train.sft": "lazyshard_swift.commands",
    "swift.rlhf_trainers.gkd_helpers": "lazyshard_swift.commands",
    "swift.megatron.trainers.base": "lazyshard_swift.trainers",
    "swift.trainers.mixin": "lazyshard_swift.trainers",
}

# Which thread searches for which module: another finder may call all finders, and must not recurse into this one.
_searches: "set[tuple[int, str]]" = set()


def find_spec(name: str, path: "Any" = None, target: "ModuleType | None" = None) -> "ModuleSpec | None":
    """Finds a module to be extended, through all other finders; None for other modules."""
    if name not in EXTENSIONS or (search := (get_ident(), name)) in _searches:
        return None
    _searches.add(search)
    try:
        for finder in tuple(sys.meta_path):
            find = getattr(finder, "find_spec", None)
            spec: ModuleSpec | None = find(name, path, target) if find is not None else None
            if spec is not None:
                # If the loader is a class, as for built-in modules, all its modules would be extended.
                if hasattr(spec.loader, "exec_module") and type(getattr(spec.loader, "__dict__", None)) is dict:
                    _extend_after(spec.loader, name)
                return spec
    finally:
        _searches.discard(search)
    return None


def _extend_after(loader: "Any", name: str) -> None:
    """Makes a loader run the extension once, after a module's own code. The extension's errors are not raised."""

    def exec_module(module: "ModuleType") -> None:
        vars(loader).pop("exec_module", None)
        loader.exec_module(module)
        if module.__name__ != name:
            return
        try:
            from lazyshard_swift.ms_swift import extend

            extend(module, EXTENSIONS[name])
        except Exception:  # noqa: S110
            # `extend` reports its failures. This is for a package that is being replaced or removed meanwhile.
            pass

    vars(loader)["exec_module"] = exec_module


def active() -> bool:
    """Returns whether the package's finder is installed in this interpreter."""
    return any(getattr(finder, "lazyshard_swift", None) is True for finder in sys.meta_path)
