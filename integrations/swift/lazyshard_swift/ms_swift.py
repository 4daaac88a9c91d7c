"""The installed ms-swift: its version, whether it has what is extended or relied on, and what became of extending it.

Version and hook points are looked up in its source files: importing it takes ten seconds. ms-swift goes on unharmed
whatever fails here. Whoever depends on an extension looks at `outcomes` and says so in its own words.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import importlib
import importlib.metadata
import importlib.util
import logging
import os
import re
import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from types import ModuleType
from typing import Any, Final, NamedTuple, TypeAlias

DISTRIBUTION: Final = "ms-swift"
SUPPORTED: Final = "4.0 to 4.6"
REQUIREMENT: Final = "ms-swift>=4.0,<4.7"
_OLDEST: Final = (4, 0)
_NEWEST: Final = (4, 6)

DEPENDENCIES: Final = ("megatron-core", "mcore-bridge")
"""The distributions that ms-swift's Megatron needs; before 4.1 not the second, and it fetches Megatron-LM by itself."""

_VERSION_LINE: Final = re.compile(r"^__version__ *= *['\"]([^'\"]+)['\"]", re.MULTILINE)


def folder() -> Path | None:
    """Returns the folder of the package `swift`, ms-swift's or another one of this name; None where there is none."""
    try:
        spec = importlib.util.find_spec("swift")
    except (ImportError, ValueError):
        # ValueError: what is in sys.modules by this name has no specification.
        return None
    places = list(spec.submodule_search_locations or ()) if spec is not None else []
    return Path(places[0]) if places else None


def version() -> str | None:
    """Returns the version of ms-swift, of the distribution or else of a checkout; None where there is none."""
    told, place = distribution_version(DISTRIBUTION), folder()
    if told is None and place is not None:
        # A checkout on PYTHONPATH has no metadata; and OpenStack's package of the same name has no such file.
        with contextlib.suppress(OSError, ValueError):
            line = _VERSION_LINE.search((place / "version.py").read_text(encoding="utf-8"))
            return line[1] if line is not None else None
    return told


def distribution_version(name: str) -> str | None:
    """Returns the version of an installed distribution, None where it is not installed."""
    try:
        # None where the metadata are damaged, whatever the annotation says.
        return importlib.metadata.version(name) or None
    except importlib.metadata.PackageNotFoundError:
        return None


def release(version: str | None) -> tuple[int, int] | None:
    """Returns the first two numbers of a version.

    >>> release("4.6.0.dev0"), release("unknown")
    ((4, 6), None)
    """
    numbers = re.match(r"(\d+)\.(\d+)", version or "")
    return (int(numbers[1]), int(numbers[2])) if numbers is not None else None


def is_supported(version: str | None) -> bool:
    """Says whether `lazyshard_swift` is made for this version of ms-swift."""
    return _OLDEST <= (release(version) or (0, 0)) <= _NEWEST


def is_too_old(version: str | None) -> bool:
    """Says whether this version of ms-swift is older than all that are supported."""
    return (release(version) or _OLDEST) < _OLDEST


def needs_bridge(version: str | None) -> bool:
    """Says whether Megatron of this ms-swift needs all of `DEPENDENCIES`."""
    return (release(version) or _NEWEST) > _OLDEST


def needed() -> str:
    """Returns which version is needed, which is installed and what to do: the end of a sentence."""
    found = version()
    there = "none is installed" if found is None else f"ms-swift {found} is installed"
    return f">= {_OLDEST[0]}.{_OLDEST[1]}.0 (supported: {SUPPORTED}), {there}: pip install '{REQUIREMENT}'"


def is_megatron(args: Any) -> bool:
    """Returns whether these are the arguments of a `megatron` command."""
    return hasattr(args, "micro_batch_size")


def is_training(args: Any) -> bool:
    """Returns whether these are the arguments of a command that trains."""
    names = {"SftArguments", "TrainArguments", "MegatronSftArguments", "MegatronTrainArguments"}
    return any(kind.__name__ in names for kind in type(args).__mro__)


MEGATRON: Final = "megatron sft"
SWIFT: Final = "swift sft"

_TRAINER: Final = "swift.megatron.trainers.base"
_MIXIN: Final = "swift.trainers.mixin"
_COMMAND_OF: Final = {"swift.cli.utils": SWIFT, _MIXIN: SWIFT, _TRAINER: MEGATRON}
"""Modules of ms-swift that one command alone needs; the others serve both."""


class HookPoint(NamedTuple):
    """A place in ms-swift, of a class or the module itself: a function with its first parameters, or a name in use."""

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


class CheckedHookPoint(NamedTuple):
    """What was found of a hook point; `file` is where it should be, from the folder that holds the package `swift`."""

    point: HookPoint
    file: str
    line: int | None
    problem: str | None


_PLACES: Final[dict[tuple[str, str], list[tuple[str, str, str | None]]]] = {
    ("swift.cli.main", ""): [
        ("the command line", "cli_main", "route_mapping is_megatron"),
        ("signals to the training's processes", "subprocess", None),
    ],
    ("swift.arguments.base_args.data_args", "DataArguments"): [("the options", "__post_init__", "self")],
    ("swift.pipelines.train.sft", "SwiftSft"): [
        ("the stream in place of a data set", "_get_dataset", "self"),
        ("no encoding ahead of training", "_encode_dataset", "self train_dataset val_dataset pre_process"),
        ("encoding row by row, in the loader's workers", "_post_process_datasets", "self datasets"),
        ("no wait for a first sample to show", "_show_dataset", "self train_dataset val_dataset"),
    ],
    (_TRAINER, "BaseMegatronTrainer"): [
        ("the loader of each rank", "_prepare_dataloader", "self train_dataset val_dataset"),
        ("the position, kept with checkpoints", "save_checkpoint", "self"),
        ("the start and the end of training", "train", "self train_dataset val_dataset"),
        ("what happens between steps", "call_event", "self event"),
    ],
    (_TRAINER, ""): [
        ("the order of samples", "MegatronPretrainingRandomSampler", None),
        ("whether a checkpoint is on disk", "maybe_finalize_async_save", None),
        ("the end of training", "should_disable_forward_pre_hook", None),
        ("the end of training", "disable_forward_pre_hook", None),
    ],
    ("swift.cli.utils", ""): [("the options in the help", "try_use_single_device_mode", "")],
    (_MIXIN, "DataLoaderMixin"): [("the loader of each rank", "get_train_dataloader", "self skip_batches")],
    (_MIXIN, ""): [
        ("the order of samples", "BatchSamplerShard", None),
        ("the loader of each rank", "DataLoaderShard", None),
    ],
    (_MIXIN, "SwiftMixin"): [
        ("the position, kept with checkpoints", "_save_checkpoint", "self"),
        ("the start and the end of training", "train", "self"),
    ],
}
"""By module and class: what each is for, its name, and the parameters that we rely on; see `HookPoint`."""

POINTS: Final = tuple(
    HookPoint(purpose, module, owner, name, None if parameters is None else tuple(parameters.split()))
    for (module, owner), places in _PLACES.items()
    for purpose, name, parameters in places
)


def check_points(points: Iterable[HookPoint], folder: Path) -> list[CheckedHookPoint]:
    """Returns what the sources in the folder of the package `swift` have of the hook points."""
    parse, found = functools.cache(_parse), []
    for point in points:
        path = folder.joinpath(*point.module.split(".")[1:]).with_suffix(".py")
        tree = parse(path)
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
        names = (name for name in ast.walk(tree) if isinstance(name, ast.Name))
        used = any(name.id == point.name and isinstance(name.ctx, ast.Load) for name in names)
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


LAUNCHER: Final = "swift.cli.main"

WARNED: Final = "LAZYSHARD_SWIFT_WARNED"
"""Environment variable that is set once the warning was given, for the processes that are started from here on."""

_RANKS: Final = ("RANK", "NODE_RANK", "GROUP_RANK")
"""Environment variables that are 0 or unset in the one process that warns. RANK alone would not do: it is unset in the
launcher of every machine."""


class ModuleOutcome(NamedTuple):
    """What became of one module of ms-swift: `reason` is the error, "" where it was extended."""

    module: str
    extension: str
    reason: str = ""


outcomes: Final[dict[str, ModuleOutcome]] = {}
"""By module what became of those that were imported so far, of each the last time."""
_lock: Final = threading.Lock()


def extend(module: ModuleType, extension: str) -> None:
    """Calls `extend(module)` of an extension, records how it went, and warns if need be; raises nothing."""
    installed = version()
    too_old, reason = is_too_old(installed), ""
    # The launcher refuses the flag.
    if too_old and module.__name__ != LAUNCHER:
        return
    try:
        importlib.import_module(extension).extend(module)
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        if isinstance(error, AttributeError) and error.obj is module:
            # Python would say that it is partially initialized, most likely due to a circular import.
            reason = f"AttributeError: it has no {error.name}"
    outcomes[module.__name__] = ModuleOutcome(module.__name__, extension, reason)
    if reason or not (too_old or is_supported(installed)):
        warn_once()


def warn_once() -> None:
    """Says which ms-swift is installed, which are supported and what could not be hooked: once in the whole job."""
    with _lock:
        if os.environ.get(WARNED) or any(os.environ.get(name) not in (None, "", "0") for name in _RANKS):
            return
        os.environ[WARNED] = "1"
    logger = logging.getLogger("lazyshard")
    if logger.hasHandlers():
        logger.warning("%s", _warning())
    else:
        # Whether or not anybody listens.
        with contextlib.suppress(OSError, ValueError):
            print(f"lazyshard: warning: {_warning()}", file=sys.stderr, flush=True)


def _warning() -> str:
    """Returns the text, on one line."""
    place = folder()
    points = check_points(POINTS, place) if place is not None else []
    missing = [f"{checked.point.title} ({checked.problem})" for checked in points if checked.problem is not None]
    missing += [f"{one.module} ({one.extension}: {one.reason})" for one in outcomes.values() if one.reason]
    hooked = f"Could not be hooked: {'; '.join(missing)}." if missing else "All hook points are there."
    text = (
        f"ms-swift {version() or 'of an unknown version'} is installed, lazyshard is made for {SUPPORTED}. {hooked} "
        f"Runs without --sharded_lazy are not affected. `lazyshard doctor swift` shows the details."
    )
    return " ".join(text.split())


Maker: TypeAlias = Callable[[Callable[..., Any]], Callable[..., Any]]
"""Takes ms-swift's function and returns what stands in its place."""


def within(context: Callable[[Any], AbstractContextManager[None]]) -> Maker:
    """Returns the maker of a method that runs ms-swift's own within a context of its object."""

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def replacement(self: Any, *rest: Any, **options: Any) -> Any:
            with context(self):
                return original(self, *rest, **options)

        return replacement

    return make


def for_streams(ours: Callable[..., Any]) -> Maker:
    """Returns the maker of a method that calls `ours(original, self, train_dataset, ...)` where that is a stream."""

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def replacement(self: Any, train_dataset: Any, *rest: Any, **options: Any) -> Any:
            if not is_stream(train_dataset):
                return original(self, train_dataset, *rest, **options)
            return ours(original, self, train_dataset, *rest, **options)

        return replacement

    return make


def is_stream(dataset: Any) -> bool:
    """Returns whether a training data set is ours, without loading what ours needs."""
    return type(dataset).__module__ == "lazyshard_swift.stream"


def wrap(owner: Any, makers: Mapping[str, Maker]) -> None:
    """Replaces functions of a class or a module."""
    missing = [name for name in makers if not callable(vars(owner).get(name))]
    if missing:
        raise AttributeError(f"{owner.__name__} has no {', no '.join(missing)}")
    originals = {name: vars(owner)[name] for name in makers}
    made = {name: functools.wraps(originals[name])(make(originals[name])) for name, make in makers.items()}
    for name, replacement in made.items():
        setattr(owner, name, replacement)
