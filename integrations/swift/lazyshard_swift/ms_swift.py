"""The installed ms-swift: its version, which are supported, and whether it has what is extended or relied on.

Found without importing it, which takes ten seconds and needs all that it needs: the hook points are looked up in its
source files with `ast`.
"""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
import re
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

DISTRIBUTION: Final = "ms-swift"
PACKAGE: Final = "swift"

SUPPORTED: Final = "4.0 to 4.6"
"""The releases that `lazyshard_swift` is made for, in words."""

REQUIREMENT: Final = "ms-swift>=4.0,<4.7"
"""What pip is to be asked for."""

_OLDEST: Final = (4, 0)
_NEWEST: Final = (4, 6)

DEPENDENCIES: Final = ("megatron-core", "mcore-bridge")
"""The distributions that ms-swift's Megatron needs."""

BRIDGE_SINCE: Final = (4, 1)
"""The first release that needs mcore-bridge for it."""

_VERSION_LINE: Final = re.compile(r"^__version__ *= *['\"]([^'\"]+)['\"]", re.MULTILINE)


def folder() -> Path | None:
    """Returns the folder of the package `swift`, ms-swift's or another one of this name; None where there is none."""
    try:
        spec = importlib.util.find_spec(PACKAGE)
    except (ImportError, ValueError):
        # ValueError: what is in sys.modules by this name has no specification.
        return None
    places = list(spec.submodule_search_locations or ()) if spec is not None else []
    return Path(places[0]) if places else None


def version() -> str | None:
    """Returns the version of ms-swift, of the distribution or else of a checkout; None where there is none."""
    told = distribution_version(DISTRIBUTION)
    if told is not None:
        return told
    place = folder()
    try:
        # A checkout on PYTHONPATH has no metadata; and OpenStack's package of the same name has no such file.
        line = _VERSION_LINE.search((place / "version.py").read_text(encoding="utf-8")) if place is not None else None
    except (OSError, ValueError):
        return None
    return line[1] if line is not None else None


def distribution_version(name: str) -> str | None:
    """Returns the version of an installed distribution, None where it is not installed."""
    try:
        # None where the metadata are damaged, whatever the annotation says.
        return importlib.metadata.version(name) or None
    except importlib.metadata.PackageNotFoundError:
        return None


def release(version: str) -> tuple[int, int] | None:
    """Returns the first two numbers of a version.

    >>> release("4.6.0.dev0"), release("unknown")
    ((4, 6), None)
    """
    numbers = re.match(r"(\d+)\.(\d+)", version)
    return (int(numbers[1]), int(numbers[2])) if numbers is not None else None


def is_supported(version: str) -> bool:
    """Says whether `lazyshard_swift` is made for this version of ms-swift."""
    found = release(version)
    return found is not None and _OLDEST <= found <= _NEWEST


def is_too_old(version: str | None) -> bool:
    """Says whether this version of ms-swift is older than all that are supported."""
    found = release(version) if version is not None else None
    return found is not None and found < _OLDEST


def needed() -> str:
    """Returns which version is needed, which is installed and what to do: the end of a sentence."""
    found = version()
    there = "none is installed" if found is None else f"ms-swift {found} is installed"
    oldest = ".".join(map(str, _OLDEST))
    return f">= {oldest}.0 (supported: {SUPPORTED}), {there}: pip install '{REQUIREMENT}'"


MEGATRON: Final = "megatron sft"
SWIFT: Final = "swift sft"

_COMMAND_OF: Final = {
    "swift.cli.utils": SWIFT,
    "swift.trainers.mixin": SWIFT,
    "swift.megatron.trainers.base": MEGATRON,
}
"""Modules of ms-swift that one command alone needs; the others serve both."""


@dataclass(frozen=True)
class HookPoint:
    """A place in ms-swift.

    Attributes:
        purpose: what it is for.
        module: the dotted name of its module.
        owner: the class that it is a method of, "" for the module itself.
        name: of the function, or of what the module uses under this name.
        parameters: of the function, those that we rely on: its first ones, by these names. All others must be
            optional. None where it is no function of this module, but a name in it that its code looks up.
    """

    purpose: str
    module: str
    owner: str
    name: str
    parameters: tuple[str, ...] | None

    @property
    def title(self) -> str:
        """The dotted name."""
        return ".".join(part for part in (self.module, self.owner, self.name) if part)

    @property
    def commands(self) -> tuple[str, ...]:
        """The commands that need it."""
        command = _COMMAND_OF.get(self.module)
        return (MEGATRON, SWIFT) if command is None else (command,)


@dataclass(frozen=True)
class CheckedHookPoint:
    """What was found of a hook point.

    Attributes:
        point: the hook point.
        file: where it should be, from the folder that holds the package `swift`.
        line: where it is, from 1; None where it was not found.
        problem: what is not as it should be; None where all is.
    """

    point: HookPoint
    file: str
    line: int | None
    problem: str | None


def _pipeline(module: str) -> tuple[HookPoint, ...]:
    def method(purpose: str, name: str, *parameters: str) -> HookPoint:
        return HookPoint(purpose, module, "SwiftSft", name, ("self", *parameters))

    return (
        method("the stream in place of a data set", "_get_dataset"),
        method("no encoding ahead of training", "_encode_dataset", "train_dataset", "val_dataset", "pre_process"),
        method("encoding row by row, in the loader's workers", "_post_process_datasets", "datasets"),
        method("no wait for a first sample to show", "_show_dataset", "train_dataset", "val_dataset"),
    )


def _megatron(purpose: str, name: str, *parameters: str) -> HookPoint:
    return HookPoint(purpose, "swift.megatron.trainers.base", "BaseMegatronTrainer", name, ("self", *parameters))


def _megatron_name(purpose: str, name: str) -> HookPoint:
    return HookPoint(purpose, "swift.megatron.trainers.base", "", name, None)


def _mixin(purpose: str, owner: str, name: str, parameters: tuple[str, ...] | None) -> HookPoint:
    return HookPoint(purpose, "swift.trainers.mixin", owner, name, parameters)


POINTS: Final = (
    HookPoint("the command line", "swift.cli.main", "", "cli_main", ("route_mapping", "is_megatron")),
    HookPoint("signals to the training's processes", "swift.cli.main", "", "subprocess", None),
    HookPoint("the options", "swift.arguments.base_args.data_args", "DataArguments", "__post_init__", ("self",)),
    *_pipeline("swift.pipelines.train.sft"),
    _megatron("the loader of each rank", "_prepare_dataloader", "train_dataset", "val_dataset"),
    _megatron_name("the order of samples", "MegatronPretrainingRandomSampler"),
    _megatron("the position, kept with checkpoints", "save_checkpoint"),
    _megatron_name("whether a checkpoint is on disk", "maybe_finalize_async_save"),
    _megatron_name("the end of training", "should_disable_forward_pre_hook"),
    _megatron_name("the end of training", "disable_forward_pre_hook"),
    _megatron("the start and the end of training", "train", "train_dataset", "val_dataset"),
    _megatron("what happens between steps", "call_event", "event"),
    HookPoint("the options in the help", "swift.cli.utils", "", "try_use_single_device_mode", ()),
    _mixin("the loader of each rank", "DataLoaderMixin", "get_train_dataloader", ("self", "skip_batches")),
    _mixin("the order of samples", "", "BatchSamplerShard", None),
    _mixin("the loader of each rank", "", "DataLoaderShard", None),
    _mixin("the position, kept with checkpoints", "SwiftMixin", "_save_checkpoint", ("self",)),
    _mixin("the start and the end of training", "SwiftMixin", "train", ("self",)),
)
"""Those of the releases that are supported."""


def check_points(points: Iterable[HookPoint], folder: Path) -> list[CheckedHookPoint]:
    """Returns what the sources have of the hook points.

    Args:
        points: the hook points.
        folder: the folder of the package `swift`.
    """
    trees: dict[str, ast.Module | str] = {}
    found = []
    for point in points:
        path = folder.joinpath(*point.module.split(".")[1:]).with_suffix(".py")
        if point.module not in trees:
            trees[point.module] = _parse(path)
        tree = trees[point.module]
        line, problem = (None, tree) if isinstance(tree, str) else _look(point, tree)
        found.append(CheckedHookPoint(point, path.relative_to(folder.parent).as_posix(), line, problem))
    return found


def _parse(path: Path) -> ast.Module | str:
    """Returns the module's syntax, or why there is none."""
    try:
        with warnings.catch_warnings():
            # Of the strings in there, for instance. They are not ours to mend.
            warnings.simplefilter("ignore")
            return ast.parse(path.read_bytes(), str(path))
    except FileNotFoundError:
        return "there is no such module"
    except (OSError, SyntaxError, ValueError) as error:
        return f"its module cannot be read: {error}"


def _look(point: HookPoint, tree: ast.Module) -> tuple[int | None, str | None]:
    """Returns the line and what is wrong."""
    body: list[ast.stmt] = tree.body
    if point.owner:
        owner = next((node for node in _bindings(body, point.owner) if isinstance(node, ast.ClassDef)), None)
        if owner is None:
            return None, f"there is no class {point.owner}"
        body = owner.body
    # The last one is what counts once the module has run.
    node = next(reversed(list(_bindings(body, point.name))), None)
    if node is None:
        return None, f"there is no {point.name}"
    if point.parameters is None:
        used = any(
            isinstance(name, ast.Name) and name.id == point.name and isinstance(name.ctx, ast.Load)
            for name in ast.walk(tree)
        )
        return node.lineno, None if used else "it is not used here any more"
    if not isinstance(node, ast.FunctionDef):
        return node.lineno, "it is no plain function any more"
    return node.lineno, _parameters_problem(node.args, point.parameters)


def _bindings(body: Iterable[ast.AST], name: str) -> Iterator[ast.stmt | ast.alias]:
    """Yields what binds a name, in order; what stands under `if`, `try` and `with` too, but not in functions."""
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            if node.name == name:
                yield node
        elif isinstance(node, ast.Import | ast.ImportFrom):
            yield from (alias for alias in node.names if (alias.asname or alias.name.partition(".")[0]) == name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if any(isinstance(target, ast.Name) and target.id == name for target in targets):
                yield node
        elif isinstance(node, ast.stmt | ast.excepthandler):
            yield from _bindings(ast.iter_child_nodes(node), name)


def _parameters_problem(arguments: ast.arguments, expected: tuple[str, ...]) -> str | None:
    """Returns what is wrong with a function's parameters."""
    positional = [argument.arg for argument in (*arguments.posonlyargs, *arguments.args)]
    keywords = [argument.arg for argument in arguments.kwonlyargs]
    shown = ", ".join([*positional, *(f"{name}=" for name in keywords)])
    if tuple(positional[: len(expected)]) != expected:
        return f"its parameters are ({shown}), expected ({', '.join(expected)})"
    required = positional[len(expected) : len(positional) - len(arguments.defaults)]
    required += [name for name, default in zip(keywords, arguments.kw_defaults, strict=True) if default is None]
    return f"it needs more than ({', '.join(expected)}): {', '.join(required)}" if required else None
