"""What would go to a package index, checked as it checks it; the wheel, and what a user gets from it alone."""

import email
import email.message
import hashlib
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from typing import Final

import pytest
import yaml
from markdown_it import MarkdownIt

import lazyshard
from tests.packaging.installed import PYTHONS, ROOT, Environment, build_wheel, run_checked

pytestmark = [pytest.mark.full, pytest.mark.timeout(300)]  # A slow package index takes minutes


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("built")
    run_checked([sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, ROOT], folder)
    return folder


@pytest.fixture(scope="module")
def metadata(built: Path) -> email.message.Message:
    (wheel,) = built.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        return email.message_from_bytes(archive.read(name))


def test_twine_finds_nothing_wrong(built: Path) -> None:
    done = run_checked([sys.executable, "-m", "twine", "check", "--strict", *sorted(built.iterdir())], built)
    assert done.count("PASSED") == 2, done


def targets(markdown: str) -> list[str]:
    inline = [child for token in MarkdownIt().enable("table").parse(markdown) for child in token.children or ()]
    return [str(value) for token in inline for name, value in token.attrs.items() if name in ("href", "src")]


def test_description_is_the_readme_and_leads_nowhere_else(metadata: email.message.Message) -> None:
    assert (metadata["License-Expression"], metadata["Description-Content-Type"]) == ("Apache-2.0", "text/markdown")
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert "docs/format.md" in targets(readme), "the README has no relative link, so this test shows nothing"
    text = metadata.get_payload(decode=True)
    assert isinstance(text, bytes)
    assert [target for target in targets(text.decode()) if not re.match(r"https?://", target)] == []
    pairs = zip(readme.splitlines(), text.decode().splitlines(), strict=True)
    assert [(ours, theirs) for ours, theirs in pairs if ours != theirs and "](" not in ours] == []


def test_pythons_and_the_version_are_the_same_everywhere(metadata: email.message.Message) -> None:
    prefix = "Programming Language :: Python :: 3."
    classified = [text.rpartition(" ")[2] for text in metadata.get_all("Classifier", []) if text.startswith(prefix)]
    script = (ROOT / "scripts" / "test_pythons").read_text(encoding="utf-8")
    known = re.search(r"^known=\((.*)\)$", script, re.MULTILINE)
    assert known is not None
    assert classified == known[1].split() == list(PYTHONS)
    assert metadata["Requires-Python"] == "<3.14,>=3.10"
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    newest = re.search(r"^## \[(.+?)\] - (unreleased|\d{4}-\d\d-\d\d)$", changelog, re.MULTILINE)
    assert newest is not None, "the newest heading of CHANGELOG.md is not '## [VERSION] - unreleased' or a date"
    assert {metadata["Version"], lazyshard.__version__, newest[1]} == {metadata["Version"]}


def git_files(*options: str) -> set[str]:
    command = ["git", "ls-files", "-z", *options]
    done = subprocess.run(command, cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        pytest.skip(f"no repository: {done.stderr.strip()}")
    return {name for name in done.stdout.split("\0") if name and (ROOT / name).is_file()}


def test_source_distribution_holds_every_file_but_those_of_the_repository_itself(built: Path) -> None:
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        members = {member.name.partition("/")[2] for member in archive.getmembers() if member.isfile()}
    tracked = git_files()
    assert tracked - members == {".ci/nightly", ".ci/run", ".editorconfig", ".gitattributes"}
    ours = tracked | git_files("--others", "--exclude-standard")  # What somebody is just writing counts as ours
    assert members - ours == {"PKG-INFO"}


def test_pre_commit_runs_the_checks_of_the_test_script() -> None:
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))["repos"][0]["hooks"]
    assert [hook["id"] for hook in hooks] == ["ruff-check", "ruff-format", "mypy"]
    script = (ROOT / "scripts" / "test").read_text(encoding="utf-8")
    checks = " ".join(script.replace("\\\n", " ").replace('"$python"', ".venv/bin/python").split())
    for hook in hooks:
        command = " ".join(hook["entry"].replace("--force-exclude", "").split())  # ruff leaves files out by itself
        assert (hook["language"], command in checks) == ("system", True), command


PACKAGES: Final = ("lazyshard", "lazyshard_producer", "lazyshard_swift")
PTH: Final = "lazyshard_swift.pth"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def core(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    return Environment(tmp_path_factory.mktemp("core"), wheel)


def contents(wheel: Path) -> dict[str, str]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: hashlib.sha256(archive.read(name)).hexdigest() for name in archive.namelist()}


def test_wheel_holds_every_source_file_and_one_start_up_file(wheel: Path) -> None:
    sources = {
        path.relative_to(parent).as_posix()
        for parent, package in zip((ROOT, ROOT / "producer", ROOT / "integrations/swift"), PACKAGES, strict=True)
        for path in (parent / package).rglob("*.py")
    }
    held = contents(wheel)
    assert sources == {name for name in held if name.endswith(".py")}
    assert {f"{package}/py.typed" for package in PACKAGES} <= set(held)
    (licence,) = [name for name in held if name.endswith(".dist-info/licenses/LICENSE")]
    assert held[licence] == hashlib.sha256((ROOT / "LICENSE").read_bytes()).hexdigest()
    for name in [f"lazyshard/cli/watch_page.{kind}" for kind in ("html", "css", "js", "mplstyle")]:
        assert held[name] == hashlib.sha256((ROOT / name).read_bytes()).hexdigest()
    tops = {name.partition("/")[0] for name in held}
    assert {top for top in tops if not top.endswith(".dist-info")} == {*PACKAGES, PTH}
    assert len(tops) == len(PACKAGES) + 2


def test_sdist_builds_the_same_wheel(wheel: Path, built: Path) -> None:
    (rebuilt,) = built.glob("*.whl")
    assert contents(rebuilt) == contents(wheel)


def test_import_comes_from_the_wheel_and_needs_no_torch_and_what_is_not_installed_is_named(core: Environment) -> None:
    names = "lazyshard.ChunkWriter, lazyshard.StreamReader"
    code = f"import importlib.util, lazyshard; {names}; print(importlib.util.find_spec('torch'), lazyshard.__file__)"
    done = core.python(code)
    assert (done.returncode, done.stderr, done.stdout.split()[0]) == (0, "", "None")
    assert Path(done.stdout.split()[1]).is_relative_to(core.folder)
    code = "import lazyshard\ntry:\n    lazyshard.LazyShardedDataset\nexcept ImportError as error:\n    print(error)"
    assert "lazyshard[torch]" in core.python(code).stdout
    for command, extra in (("lazyshard-producer", "lazyshard[producer]"), ("lazyshard", "lazyshard[cli]")):
        done = core.command(command, "--help")
        assert (done.returncode != 0, done.stdout, done.stderr.count("\n"), extra in done.stderr) == (True, "", 1, True)


def test_commands_with_the_extra_of_the_producer_which_brings_no_torch(wheel: Path, tmp_path: Path) -> None:
    producer = Environment(tmp_path / "producer", f"{wheel}[producer]")
    done = producer.command("lazyshard-producer", "run", "--help")
    assert (done.returncode, "usage" in done.stdout.lower()) == (0, True), done.stderr
    done = producer.python("import torch")
    assert (done.returncode, "ModuleNotFoundError" in done.stderr) == (1, True)
    done = producer.command("lazyshard", "doctor", "swift")  # Its requirements are the producer's
    assert (done.returncode, done.stderr) == (1, "")
    lines = [" ".join(line.split()) for line in done.stdout.splitlines()]
    assert "NOT OK ms-swift not installed: pip install 'ms-swift>=4.0,<4.7'" in lines
    assert "ok finder active in this interpreter" in lines
    assert "NOT OK megatron sft --sharded_lazy true cannot start: ms-swift is not installed" in lines


FINDERS: Final = "import sys; print([type(f).__name__ for f in sys.meta_path if hasattr(f, 'lazyshard_swift')])"


def editable_wheel(project: Path, folder: Path) -> Path:
    code = "import sys; from hatchling.build import build_editable; print(build_editable(sys.argv[1]))"
    name = run_checked([sys.executable, "-c", code, folder], project).split()[-1]
    return folder / name


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy of what an editable install needs; its own, so that it can be deleted."""
    project = tmp_path / "checkout"
    for folder in ("lazyshard", "producer", "integrations"):
        shutil.copytree(ROOT / folder, project / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "hatch_build.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, project)
    return project


@pytest.mark.parametrize("editable", [False, True])
def test_start_up_file_comes_and_goes_with_package(editable: bool, wheel: Path, checkout: Path, tmp_path: Path) -> None:
    package = editable_wheel(checkout, tmp_path) if editable else wheel
    environment = Environment(tmp_path / "environment", "--no-deps", package)
    (installed,) = environment.folder.glob(f"lib/python*/site-packages/{PTH}")
    done = environment.python(FINDERS)
    assert (done.stdout, done.stderr) == ("['function']\n", "")
    swift = tmp_path / "swift"  # In a child, and with a module of ms-swift's name in place
    swift.mkdir()
    (swift / "__init__.py").write_text(FINDERS)
    code = f"""
import subprocess, sys
child = "import sys; sys.path.insert(0, {str(tmp_path)!r}); import swift"
print(subprocess.run([sys.executable, "-c", child], capture_output=True, text=True, check=True))
"""
    done = environment.python(code)
    assert "stdout=\"['function']\\n\", stderr=''" in done.stdout, done
    environment.install("uninstall", "lazyshard")
    assert not installed.exists()
    done = environment.python(FINDERS)
    assert (done.stdout, done.stderr) == ("[]\n", "")


def test_start_up_file_of_a_checkout_that_is_gone_does_no_harm_and_says_so(checkout: Path, tmp_path: Path) -> None:
    environment = Environment(tmp_path / "environment", "--no-deps", editable_wheel(checkout, tmp_path))
    shutil.rmtree(checkout)
    (tmp_path / "swift.py").write_text("value = 1\n")
    done = environment.python(f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import swift; print(swift.value)")
    assert (done.returncode, done.stdout) == (0, "1\n")
    assert f"site-packages/{PTH}" in done.stderr
    assert "No module named 'lazyshard_swift'" in done.stderr
