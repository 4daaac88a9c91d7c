"""What is found of ms-swift in its source files, and what `lazyshard doctor swift` says of it."""

from __future__ import annotations

import json
import site
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest

from lazyshard.examination import Finding
from lazyshard_swift import doctor, hook, ms_swift
from lazyshard_swift.ms_swift import POINTS, HookPoint, check_points
from tests.swift.programs import python
from tests.swift.stand_ins import make_swift, package_folder, write

METHOD = HookPoint("a method", "swift.pipelines.train.sft", "SwiftSft", "_show_dataset", ("self", "train_dataset"))
NAME = HookPoint("a name", "swift.trainers.mixin", "", "BatchSamplerShard", None)


def test_installed_ms_swift_has_all_hook_points_and_is_not_imported() -> None:
    folder, version = ms_swift.folder(), ms_swift.version()
    assert folder is not None and version is not None, "ms-swift is not installed; run `scripts/environment full`"
    assert ms_swift.is_supported(version)
    found = check_points(POINTS, folder)
    assert [(checked.point.title, checked.problem) for checked in found if checked.problem is not None] == []
    for checked in found:
        assert checked.line is not None
        line = (folder.parent / checked.file).read_text(encoding="utf-8").splitlines()[checked.line - 1]
        assert checked.point.name in line
    code = """
import sys
from lazyshard_swift import ms_swift
ms_swift.check_points(ms_swift.POINTS, ms_swift.folder())
print([name for name in sys.modules if name.partition(".")[0] in {"swift", "torch", "transformers"}])
"""
    done = python(code)
    assert (done.returncode, done.stdout, done.stderr) == (0, "[]\n", "")


def test_each_module_that_is_extended_has_hook_points_of_its_commands() -> None:
    assert len({point.title for point in POINTS}) == len(POINTS)
    both, megatron, swift = ("megatron sft", "swift sft"), ("megatron sft",), ("swift sft",)
    assert {point.module: point.commands for point in POINTS} == {
        "swift.cli.main": both,
        "swift.cli.utils": swift,
        "swift.arguments.base_args.data_args": both,
        "swift.pipelines.train.sft": both,
        "swift.megatron.trainers.base": megatron,
        "swift.trainers.mixin": swift,
    }
    assert {point.module for point in POINTS} == set(hook.EXTENSIONS)


def test_tree_that_has_all_or_lacks_one(tmp_path: Path) -> None:
    found = check_points(POINTS, make_swift(tmp_path / "all", POINTS))
    assert [(checked.point, checked.problem) for checked in found] == [(point, None) for point in POINTS]
    assert found[0].file == "swift/cli/main.py"
    for number, point in enumerate(POINTS):
        folder = make_swift(tmp_path / str(number), [other for other in POINTS if other != point])
        bad = [checked for checked in check_points(POINTS, folder) if checked.problem is not None]
        assert [(checked.point, checked.line) for checked in bad] == [(point, None)]


def one(point: HookPoint, source: str, folder: Path) -> tuple[int | None, str | None]:
    path = folder.joinpath(*point.module.split(".")).with_suffix(".py")
    (checked,) = check_points([point], write(path, source) and folder / "swift")
    return checked.line, checked.problem


def method(parameters: str, before: str = "") -> str:
    return f"class SwiftSft:\n    {before}def _show_dataset({parameters}):\n        pass\n"


LAST = method("self") + "    try:\n        pass\n    finally:\n        def _show_dataset(self, train_dataset): pass\n"


@pytest.mark.parametrize(
    ("source", "line", "problem"),
    [
        (method("self, train_dataset"), 2, None),
        (method("self, train_dataset, /, *, more=1"), 2, None),
        (method("self, train_dataset, more=None, *rest, **options"), 2, None),
        (LAST, 7, None),
        (method("self"), 2, "its parameters are (self), expected (self, train_dataset)"),
        (method("self, data, *, quiet"), 2, "its parameters are (self, data, quiet=), expected (self, train_dataset)"),
        (method("self, train_dataset, now"), 2, "it needs more than (self, train_dataset): now"),
        (method("self, train_dataset, *, now, then=1"), 2, "it needs more than (self, train_dataset): now"),
        (method("self, train_dataset", "async "), 2, "it is no plain function any more"),
        ("class SwiftSft:\n    _show_dataset = None\n", 2, "it is no plain function any more"),
        ("class SwiftSft:\n    pass\n", None, "there is no _show_dataset"),
        ("def f():\n    class SwiftSft:\n        pass\n", None, "there is no class SwiftSft"),
        ("class SwiftSft(:\n", None, "its module cannot be read: invalid syntax (sft.py, line 1)"),
    ],
)
def test_method(source: str, line: int | None, problem: str | None, tmp_path: Path) -> None:
    found, said = one(METHOD, source, tmp_path)
    assert (found, said and said.replace(f"{tmp_path}/swift/pipelines/train/", "")) == (line, problem)


USE = "\n\ndef f():\n    return BatchSamplerShard()\n"


@pytest.mark.parametrize(
    ("source", "line", "problem"),
    [
        (f"from swift.dataloader import (\n    Other,\n    BatchSamplerShard,\n){USE}", 3, None),
        (f"from swift.dataloader import Other as BatchSamplerShard{USE}", 1, None),
        (f"import BatchSamplerShard.part{USE}", 1, None),
        (f"try:\n    pass\nexcept ImportError:\n    from x import BatchSamplerShard{USE}", 4, None),
        (f"if 1:\n    class BatchSamplerShard: pass{USE}", 2, None),
        (f"with x:\n    BatchSamplerShard: type = object{USE}", 2, None),
        # Warnings about their source are not ours.
        ("from x import BatchSamplerShard\nBatchSamplerShard('\\d')\n", 1, None),
        ("from x import BatchSamplerShard\n", 1, "it is not used here any more"),
        (f"def f():\n    from x import BatchSamplerShard{USE}", None, "there is no BatchSamplerShard"),
        ("import x\nx.BatchSamplerShard()\n", None, "there is no BatchSamplerShard"),
    ],
)
def test_name(source: str, line: int | None, problem: str | None, tmp_path: Path) -> None:
    assert one(NAME, source, tmp_path) == (line, problem)


@pytest.mark.parametrize(
    ("version", "release", "supported", "too_old"),
    [
        ("3.12.6", (3, 12), False, True),
        ("4.0.0.dev0", (4, 0), True, False),
        ("4.6.12", (4, 6), True, False),
        ("4.7.0", (4, 7), False, False),
        ("5", None, False, False),
    ],
)
def test_versions(version: str, release: tuple[int, int] | None, supported: bool, too_old: bool) -> None:
    assert ms_swift.release(version) == release
    assert (ms_swift.is_supported(version), ms_swift.is_too_old(version)) == (supported, too_old)


FOUND = "from lazyshard_swift import ms_swift; print(ms_swift.folder(), ms_swift.version())"


@pytest.mark.parametrize(
    ("file", "version"),
    [("__version__ = '4.5.0.dev0'\n", "4.5.0.dev0"), ("", None), ("from x import __version__\n", None)],
)
def test_checkout_without_metadata_or_no_ms_swift(file: str, version: str | None, tmp_path: Path) -> None:
    folder = make_swift(tmp_path / "there", ms_swift.POINTS)
    write(folder / "version.py", file)
    done = python(FOUND, tmp_path / "there", package_folder(), site=False)
    assert (done.stdout, done.stderr) == (f"{folder} {version}\n", "")
    if file:
        (folder / "version.py").unlink()
        assert python(FOUND, tmp_path / "there", package_folder(), site=False).stdout == f"{folder} None\n"
    for before in ("", "import sys, types; sys.modules['swift'] = types.ModuleType('swift')\n"):
        done = python(before + FOUND, package_folder(), site=False)
        assert (done.stdout, done.stderr) == ("None None\n", "")


ALL: Final = {"torch": "2.13.0", "transformers": "5.19.0", "megatron-core": "0.16.1", "mcore-bridge": "1.6.5"}
MEGATRON: Final = "megatron sft --sharded_lazy true"
SWIFT: Final = "swift sft --sharded_lazy true"
RUNS: Final = "runs: every rank reads its own chunks"
REFUSES: Final = "refuses the option, which ms-swift does not know: "
STOPS: Final = "stops before training: "
Examine = Callable[..., dict[str, Finding]]


@pytest.fixture
def examine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Examine:
    """Examines an environment that is made up, in which all is well but for what is missing."""
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    hook.install()

    def examine(version: str | None = "4.6.0", *missing: str) -> dict[str, Finding]:
        folder = tmp_path / "swift" if version is not None else None
        monkeypatch.setattr(ms_swift, "version", lambda: version)
        monkeypatch.setattr(ms_swift, "folder", lambda: folder)
        distributions = {name: number for name, number in ALL.items() if name not in missing}
        monkeypatch.setattr(ms_swift, "distribution_version", distributions.get)
        monkeypatch.setattr(doctor, "__file__", str(tmp_path / "lazyshard_swift" / "doctor.py"))
        monkeypatch.setattr(site, "getsitepackages", lambda: [str(tmp_path / "site")])
        monkeypatch.setattr(site, "ENABLE_USER_SITE", False)
        files = [f"{name.replace('.', '/')}.py" for name in hook.EXTENSIONS.values() if name not in missing]
        for name in ["site/lazyshard_swift.pth", *files]:
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).touch()
        if "active" in missing:
            (tmp_path / "site" / "lazyshard_swift.pth").unlink()
            sys.meta_path[:] = [finder for finder in sys.meta_path if not hasattr(finder, hook.MARK)]
        make_swift(tmp_path, [point for point in ms_swift.POINTS if point.name not in missing])
        findings = doctor.examine()
        sections = list(dict.fromkeys(finding.section for finding in findings))
        points = ["hook points"] if version is not None else []
        assert sections == ["versions", "start-up", "extensions", *points, "verdict"]
        found = {finding.subject: finding for finding in findings}
        assert len(found) == len(findings)
        return found

    return examine


def not_ok(found: dict[str, Finding]) -> set[str]:
    return {subject for subject, finding in found.items() if finding.ok is False}


def test_all_is_well(examine: Examine, tmp_path: Path) -> None:
    found = examine()
    assert not_ok(found) == set()
    assert found["ms-swift"].answer == f"4.6.0 in {tmp_path}/swift"
    assert found["torch"] == Finding("versions", "torch", "2.13.0", True)
    assert found["lazyshard_swift.pth"].answer == f"{tmp_path}/site/lazyshard_swift.pth"
    assert found["swift.cli.main.cli_main"].answer == "swift/cli/main.py:4 (the command line)"
    for command in (MEGATRON, SWIFT):
        assert found[command] == Finding("verdict", command, RUNS, True)


# Version, what is missing, what is found not to be in order besides the commands, and what is said of some.
TROUBLES: list[tuple[str | None, list[str], set[str], dict[str, str]]] = [
    (None, [], {"ms-swift"}, {"ms-swift": "not installed: pip", MEGATRON: "cannot start", SWIFT: "cannot start"}),
    (
        "4.6.0",
        ["megatron-core", "mcore-bridge"],
        {"megatron-core", "mcore-bridge"},
        {MEGATRON: "does not start", "megatron-core": "not installed: pip install megatron-core", SWIFT: RUNS},
    ),
    # The bridge is not needed by older releases.
    ("4.0.0", ["mcore-bridge"], set(), {"mcore-bridge": "not installed, and not", MEGATRON: RUNS, SWIFT: RUNS}),
    ("4.7.0", [], {"ms-swift"}, {"ms-swift": "4.7.0 in ", MEGATRON: "may run", SWIFT: "may run"}),
    ("4.6.0", ["active"], {"lazyshard_swift.pth", "finder"}, {MEGATRON: REFUSES, SWIFT: REFUSES}),
    ("4.6.0", ["__post_init__"], {"__post_init__"}, {MEGATRON: REFUSES, SWIFT: REFUSES}),
    ("4.6.0", ["_show_dataset"], {"_show_dataset"}, {MEGATRON: STOPS, SWIFT: STOPS}),
    ("4.6.0", ["_prepare_dataloader"], {"_prepare_dataloader"}, {MEGATRON: STOPS, SWIFT: RUNS}),
    ("4.6.0", ["get_train_dataloader"], {"get_train_dataloader"}, {MEGATRON: RUNS, SWIFT: STOPS}),
    *(
        ("4.6.0", [name], {name}, {MEGATRON: megatron, SWIFT: swift})
        for name, megatron, swift in (
            ("lazyshard_swift.arguments", REFUSES, REFUSES),
            ("lazyshard_swift.megatron", STOPS, RUNS),
            ("lazyshard_swift.huggingface", RUNS, STOPS),
        )
    ),
]


@pytest.mark.parametrize(("version", "missing", "bad", "answers"), TROUBLES)
def test_trouble(
    examine: Examine, version: str | None, missing: list[str], bad: set[str], answers: dict[str, str]
) -> None:
    found = examine(version, *missing)
    titles = {point.title for point in ms_swift.POINTS if point.name in bad}
    named = titles or bad
    assert not_ok(found) == named | {command for command in (MEGATRON, SWIFT) if answers[command] != RUNS}
    assert [subject for subject, words in answers.items() if not found[subject].answer.startswith(words)] == []
    # Of what stops it the verdict names the hook point or the extension.
    for command in (MEGATRON, SWIFT):
        if answers[command] in (REFUSES, STOPS) and missing != ["active"]:
            assert all(name in found[command].answer for name in named)


def test_real_command() -> None:
    """In this environment, with whatever it has; it must find ms-swift and its hook points."""
    pytest.importorskip("typer")
    code = """
import sys
from lazyshard.cli.main import main
main(["doctor", "swift", "--json"])
print([name for name in sys.modules if name.partition(".")[0] in {"swift", "torch", "transformers"}])
"""
    done = python(code)
    assert done.stderr == ""
    result, imported = done.stdout.splitlines()
    found: dict[str, dict[str, Any]] = {finding["subject"]: finding for finding in json.loads(result)["findings"]}
    assert imported == "[]"
    assert found["ms-swift"]["answer"].startswith(f"{ms_swift.version()} in {ms_swift.folder()}")
    assert {finding["ok"] for finding in found.values() if finding["section"] == "hook points"} == {True}
    assert found["finder"]["ok"] is found["lazyshard_swift.pth"]["ok"] is True
