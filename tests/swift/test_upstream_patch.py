"""The patch for ms-swift: it applies to the installed one, and calls what there is, as it is to be called.

`scripts/try_upstream_patch` trains with it.
"""

from __future__ import annotations

import ast
import inspect
import os
import re
import shutil
import subprocess
import sys
import types
from pathlib import Path
from typing import Any, Final

import pytest

from lazyshard_swift import arguments, hook, hooked, native, versions
from lazyshard_swift.stream import TrainStream
from tests.swift.commands import _environment, missing_stack
from tests.swift.stand_ins import ROOT, python

PATCH: Final = ROOT / "integrations" / "swift" / "upstream" / "lazyshard.patch"
MADE_FOR: Final = "4.6.0"
MODULE: Final = "swift/dataset/sharded_lazy.py"
TESTS: Final = "tests/train/test_sharded_lazy.py"

STAY_WITH_THE_HOOKS: Final = {"lazyshard_swift.launcher", "lazyshard_swift.help"}
"""Extensions of what is no part of the feature."""


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the installed ms-swift with the patch applied."""
    folder, version = versions.folder(), versions.installed()
    if folder is None or version != MADE_FOR:
        pytest.skip(f"the patch is made for ms-swift {MADE_FOR}, installed is {version}")
    copy = tmp_path_factory.mktemp("patched")
    shutil.copytree(folder, copy / "swift", ignore=shutil.ignore_patterns("__pycache__"))
    # Within a repository git apply would leave out what is not in it, without a word.
    environment = {**os.environ, "GIT_CEILING_DIRECTORIES": str(copy.parent)}
    command = ["git", "apply", "--whitespace=nowarn", str(PATCH)]
    done = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    return copy


def syntax(path: Path) -> ast.Module:
    return ast.parse(path.read_bytes(), str(path))


def touched() -> set[str]:
    return set(re.findall(r"^\+\+\+ b/(.+)$", PATCH.read_text(encoding="utf-8"), re.MULTILINE))


def test_patch_is_applied_and_can_be_parsed(tree: Path) -> None:
    for name in touched():
        assert (tree / name).is_file(), name
        if name.endswith(".py"):
            syntax(tree / name)
    assert {MODULE, TESTS} < touched()


def test_modules_that_we_extend_know_it_by_themselves(tree: Path) -> None:
    extended = {
        name.replace(".", "/") + ".py"
        for name, extension in hook.EXTENSIONS.items()
        if extension not in STAY_WITH_THE_HOOKS and (tree / (name.replace(".", "/") + ".py")).is_file()
    }
    assert len(extended) == 4
    assert {name for name in touched() if name.startswith("swift/")} == {*extended, MODULE}
    for name in extended:
        imports = [node for node in ast.walk(syntax(tree / name)) if isinstance(node, ast.ImportFrom)]
        names = {alias.name for node in imports if node.module == "swift.dataset" for alias in node.names}
        assert "sharded_lazy" in names, name


def test_hooks_leave_such_modules_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hooked, "_outcomes", {})
    monkeypatch.setattr(hooked, "_supported", lambda: True)
    calls = []
    extension = types.ModuleType("counting_extension")
    vars(extension)["extend"] = lambda module: calls.append(module.__name__)
    monkeypatch.setitem(sys.modules, "counting_extension", extension)
    knowing, other = types.ModuleType("knowing"), types.ModuleType("other")
    vars(knowing)["sharded_lazy"] = types.ModuleType("swift.dataset.sharded_lazy")
    vars(other)["sharded_lazy"] = True
    for module in (knowing, other):
        hooked.extend(module, "counting_extension")
    assert calls == ["other"]
    assert [(outcome.module, outcome.ok) for outcome in hooked.outcomes()] == [("knowing", True), ("other", True)]


def test_arguments_are_ours(tree: Path) -> None:
    body = syntax(tree / "swift/arguments/base_args/data_args.py").body
    (owner,) = [node for node in body if isinstance(node, ast.ClassDef) and node.name == "DataArguments"]
    defaults = {
        node.target.id: ast.literal_eval(node.value)
        for node in owner.body
        if isinstance(node, ast.AnnAssign)
        and isinstance(node.target, ast.Name)
        and node.target.id.startswith("sharded_lazy")
        and node.value is not None
    }
    assert defaults == {name: field.default for name, _, field in arguments._FIELDS}
    documented = re.findall(r"^ +(sharded_lazy\w*) \(", ast.get_docstring(owner, clean=False) or "", re.MULTILINE)
    guide = (tree / "docs/source_en/Customization/Sharded-Lazy-Dataset.md").read_text(encoding="utf-8")
    listed = re.findall(r"^- (sharded_lazy\w*):", guide, re.MULTILINE)
    assert (documented, listed) == (list(defaults), list(defaults))


def test_what_it_calls_is_there_and_stays() -> None:
    public = {name: value for name, value in vars(native).items() if inspect.isfunction(value)}
    assert {name: list(inspect.signature(value).parameters) for name, value in public.items()} == {
        "check_arguments": ["args"],
        "open_stream": ["args", "template"],
        "show": ["pipeline", "stream", "val_dataset"],
        "loader_classes": ["trainer", "stream", "sampler", "loader"],
        "begin_epoch": ["trainer", "stream", "loader"],
        "saving": ["trainer"],
        "megatron_training": ["trainer", "stream"],
        "megatron_loading": ["trainer", "stream"],
        "megatron_saving": ["trainer"],
    }
    assert native.INTERFACE == 1, "another interface needs another patch"
    assert TrainStream.is_sharded_lazy is True


def test_it_calls_all_of_that_with_as_many_arguments(tree: Path) -> None:
    called = {}
    for node in ast.walk(syntax(tree / MODULE)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            source: Any = node.func.value
            if isinstance(source, ast.Call) and isinstance(source.func, ast.Name) and source.func.id == "_native":
                called[node.func.attr] = len(node.args)
    public = {name: value for name, value in vars(native).items() if inspect.isfunction(value)}
    assert called == {name: len(inspect.signature(value).parameters) for name, value in public.items()}


def test_what_it_imports_at_every_start_brings_no_torch() -> None:
    code = "import sys; from lazyshard_swift import native; print('torch' in sys.modules, 'lazyshard' in sys.modules)"
    done = python(code, ROOT, ROOT / "integrations" / "swift", site=True)
    assert (done.stdout, done.stderr) == ("False False\n", "")


@pytest.mark.timeout(300)
def test_its_own_tests_pass(tree: Path, tmp_path: Path) -> None:
    reason = missing_stack()
    if reason is not None:
        pytest.skip(reason)
    paths = [tree, ROOT, ROOT / "integrations" / "swift"]
    done = subprocess.run(
        [sys.executable, str(tree / TESTS)],
        cwd=tmp_path,
        env={**_environment(tmp_path), "PYTHONPATH": os.pathsep.join(map(str, paths))},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    assert re.search(r"^Ran 7 tests in .*\n\nOK$", done.stderr, re.MULTILINE), done.stderr[-2000:]
