from collections.abc import Callable
from pathlib import Path

import pytest

from lazyshard_swift import hook, ms_swift
from lazyshard_swift.ms_swift import POINTS, HookPoint, check_points
from tests.swift.programs import python
from tests.swift.stand_ins import make_swift, package_folder, write

METHOD = HookPoint("a method", "swift.pipelines.train.sft", "SwiftSft", "_show_dataset", ("self", "train_dataset"))
NAME = HookPoint("a name", "swift.trainers.mixin", "", "BatchSamplerShard", None)


def test_installed_ms_swift_has_all_hook_points() -> None:
    folder, version = ms_swift.folder(), ms_swift.version()
    assert folder is not None and version is not None, "ms-swift is not installed; run `scripts/environment full`"
    assert ms_swift.is_supported(version)
    found = check_points(POINTS, folder)
    assert [(checked.point.title, checked.problem) for checked in found if checked.problem is not None] == []
    for checked in found:
        assert checked.line is not None
        line = (folder.parent / checked.file).read_text(encoding="utf-8").splitlines()[checked.line - 1]
        assert checked.point.name in line


def test_nothing_of_ms_swift_is_imported() -> None:
    code = """
import sys
from lazyshard_swift import ms_swift
ms_swift.check_points(ms_swift.POINTS, ms_swift.folder())
print([name for name in sys.modules if name.partition(".")[0] in {"swift", "torch", "transformers"}])
"""
    done = python(code)
    assert (done.returncode, done.stdout, done.stderr) == (0, "[]\n", "")


def test_each_module_that_is_extended_has_hook_points() -> None:
    assert {point.module for point in POINTS} == set(hook.EXTENSIONS)


def test_titles_are_unique() -> None:
    assert len({point.title for point in POINTS}) == len(POINTS)


def test_commands() -> None:
    by_module = {point.module: point.commands for point in POINTS}
    assert by_module["swift.cli.main"] == by_module["swift.pipelines.train.sft"] == ("megatron sft", "swift sft")
    assert by_module["swift.megatron.trainers.base"] == ("megatron sft",)
    assert by_module["swift.trainers.mixin"] == ("swift sft",)


def test_tree_that_has_all(tmp_path: Path) -> None:
    found = check_points(POINTS, make_swift(tmp_path, POINTS))
    assert [checked.point for checked in found] == list(POINTS)
    assert {checked.problem for checked in found} == {None}
    assert found[0].file == "swift/cli/main.py"


@pytest.mark.parametrize("point", POINTS, ids=lambda point: point.title)
def test_tree_that_lacks_one(point: HookPoint, tmp_path: Path) -> None:
    folder = make_swift(tmp_path, [other for other in POINTS if other != point])
    bad = [checked for checked in check_points(POINTS, folder) if checked.problem is not None]
    assert [(checked.point, checked.line) for checked in bad] == [(point, None)]


def one(point: HookPoint, source: str, folder: Path) -> tuple[int | None, str | None]:
    path = folder.joinpath(*point.module.split(".")).with_suffix(".py")
    (checked,) = check_points([point], write(path, source) and folder / "swift")
    return checked.line, checked.problem


def method(parameters: str, before: str = "") -> str:
    return f"class SwiftSft:\n    {before}def _show_dataset({parameters}):\n        pass\n"


@pytest.mark.parametrize(
    "parameters",
    [
        "self, train_dataset",
        "self, train_dataset=None",
        "self, train_dataset, /, *, more=1",
        "self, train_dataset, more=None, *rest, **options",
    ],
)
def test_parameters_that_fit(parameters: str, tmp_path: Path) -> None:
    assert one(METHOD, method(parameters), tmp_path) == (2, None)


@pytest.mark.parametrize(
    ("source", "line", "problem"),
    [
        (method("self"), 2, "its parameters are (self), expected (self, train_dataset)"),
        (method("self, data, *, quiet"), 2, "its parameters are (self, data, quiet=), expected (self, train_dataset)"),
        (method("self, *train_dataset"), 2, "its parameters are (self), expected (self, train_dataset)"),
        (method("self, train_dataset, now"), 2, "it needs more than (self, train_dataset): now"),
        (method("self, train_dataset, *, now, then=1"), 2, "it needs more than (self, train_dataset): now"),
        (method("self, train_dataset", "async "), 2, "it is no plain function any more"),
        ("class SwiftSft:\n    _show_dataset = None\n", 2, "it is no plain function any more"),
        ("class SwiftSft:\n    pass\n", None, "there is no _show_dataset"),
        ("def f():\n    class SwiftSft:\n        pass\n", None, "there is no class SwiftSft"),
        ("SwiftSft = None\n", None, "there is no class SwiftSft"),
        ("class SwiftSft(:\n", None, "its module cannot be read: invalid syntax (sft.py, line 1)"),
    ],
)
def test_method_that_does_not_fit(source: str, line: int | None, problem: str, tmp_path: Path) -> None:
    found, said = one(METHOD, source, tmp_path)
    assert (found, (said or "").replace(f"{tmp_path}/swift/pipelines/train/", "")) == (line, problem)


def test_last_definition_counts(tmp_path: Path) -> None:
    source = (
        method("self") + "    try:\n        pass\n    finally:\n        def _show_dataset(self, train_dataset): pass\n"
    )
    assert one(METHOD, source, tmp_path) == (7, None)


@pytest.mark.parametrize(
    ("bound", "line"),
    [
        ("from swift.dataloader import (\n    Other,\n    BatchSamplerShard,\n)", 3),
        ("from swift.dataloader import Other as BatchSamplerShard", 1),
        ("import BatchSamplerShard.part", 1),
        ("try:\n    pass\nexcept ImportError:\n    from x import BatchSamplerShard", 4),
        ("if 1:\n    class BatchSamplerShard: pass", 2),
        ("with x:\n    BatchSamplerShard: type = object", 2),
    ],
)
def test_name_that_is_used(bound: str, line: int, tmp_path: Path) -> None:
    assert one(NAME, f"{bound}\n\ndef f():\n    return BatchSamplerShard()\n", tmp_path) == (line, None)


@pytest.mark.parametrize(
    ("source", "line", "problem"),
    [
        ("from x import BatchSamplerShard\n", 1, "it is not used here any more"),
        (
            "def f():\n    from x import BatchSamplerShard\n    BatchSamplerShard()\n",
            None,
            "there is no BatchSamplerShard",
        ),
        ("import x\nx.BatchSamplerShard()\n", None, "there is no BatchSamplerShard"),
    ],
)
def test_name_that_is_not(source: str, line: int | None, problem: str, tmp_path: Path) -> None:
    assert one(NAME, source, tmp_path) == (line, problem)


def test_warnings_about_their_source_are_not_ours(tmp_path: Path) -> None:
    source = r"from x import BatchSamplerShard" + "\nBatchSamplerShard('\\d')\n"
    assert one(NAME, source, tmp_path) == (1, None)


@pytest.mark.parametrize(
    ("version", "release", "supported", "too_old"),
    [
        ("2.6.1", (2, 6), False, True),
        ("3.12.6", (3, 12), False, True),
        ("4.0.0.dev0", (4, 0), True, False),
        ("4.6.12", (4, 6), True, False),
        ("4.7.0", (4, 7), False, False),
        ("4.10.0", (4, 10), False, False),
        ("5", None, False, False),
        ("main", None, False, False),
    ],
)
def test_versions(version: str, release: tuple[int, int] | None, supported: bool, too_old: bool) -> None:
    assert ms_swift.release(version) == release
    assert (ms_swift.is_supported(version), ms_swift.is_too_old(version)) == (supported, too_old)


def without_files(folder: Path) -> None:
    (folder / "version.py").unlink()


def with_other_version_file(folder: Path) -> None:
    write(folder / "version.py", "from x import __version__\n")


@pytest.mark.parametrize(
    ("damage", "version"),
    [(lambda folder: None, "4.5.0.dev0"), (without_files, None), (with_other_version_file, None)],
)
def test_checkout_without_metadata(damage: Callable[[Path], None], version: str | None, tmp_path: Path) -> None:
    folder = make_swift(tmp_path, ms_swift.POINTS, "4.5.0.dev0")
    damage(folder)
    code = "from lazyshard_swift import ms_swift; print(ms_swift.folder(), ms_swift.version())"
    done = python(code, tmp_path, package_folder(), site=False)
    assert (done.stdout, done.stderr) == (f"{folder} {version}\n", "")


@pytest.mark.parametrize("before", ["", "import sys, types; sys.modules['swift'] = types.ModuleType('swift')"])
def test_no_ms_swift(before: str) -> None:
    code = f"{before}\nfrom lazyshard_swift import ms_swift; print(ms_swift.folder(), ms_swift.version())"
    done = python(code, package_folder(), site=False)
    assert (done.stdout, done.stderr) == ("None None\n", "")
