"""What would go to a package index, checked as it checks it; the wheel: what a user gets from it, on which Pythons."""

import email
import email.message
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Final

import pytest
import yaml
from markdown_it import MarkdownIt

import lazyshard
from tests.scripts.test_scripts import environment_script

pytestmark = [pytest.mark.full, pytest.mark.timeout(300)]  # A slow package index takes minutes

ROOT: Final = Path(__file__).resolve().parents[2]
Completed = subprocess.CompletedProcess[str]
PYTHONS: Final = ("3.10", "3.11", "3.12", "3.13")


def run(command: Sequence[str | Path], cwd: Path, variables: Mapping[str, str] = os.environ) -> Completed:
    """Run outside the source tree, with no variable that could let it be imported from there."""
    env = {name: value for name, value in variables.items() if name not in {"PYTHONPATH", "PYTHONHOME"}}
    env.update(COLUMNS="120", NO_COLOR="1", TERM="dumb")  # No wrapping and no colours in what the commands print
    options: dict[str, Any] = {"stdin": subprocess.DEVNULL, "capture_output": True, "text": True}
    return subprocess.run(list(map(str, command)), cwd=cwd, env=env, **options)


def run_checked(command: Sequence[str | Path], cwd: Path, variables: Mapping[str, str] = os.environ) -> str:
    done = run(command, cwd, variables)
    assert done.returncode == 0, f"{command} exited {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@cache
def uv() -> Any:
    environment = environment_script().Environment("core")
    environment.prepare()
    return environment


class Environment:  # A virtual environment that holds the wheel, some of its extras, and what those require
    def __init__(self, folder: Path, *requirements: str | Path, python: Path | None = None) -> None:
        self.folder = folder
        self.bin = folder / "bin"
        if python is None:
            venv.create(folder, symlinks=True)
        else:
            run_checked([uv().uv, "venv", "--python", python, folder], folder.parent, uv().variables)
        self.install("install", *requirements)

    def install(self, action: str, *arguments: str | Path) -> None:
        command = [uv().uv, "pip", action, "--quiet", "--python", self.bin / "python", *arguments]
        run_checked(command, self.folder, uv().variables)

    def python(self, code: str, *options: str) -> Completed:
        return run([self.bin / "python", "-I", *options, "-c", code], self.folder)

    def command(self, name: str, *arguments: str) -> Completed:
        return run([self.bin / name, *arguments], self.folder)


def build(folder: Path, *options: str) -> Path:
    run_checked([sys.executable, "-m", "build", *options, "--no-isolation", "--outdir", folder, ROOT], folder)
    return folder


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("built"))


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
    (path,) = build(tmp_path_factory.mktemp("wheel"), "--wheel").glob("*.whl")
    return path


@pytest.fixture(scope="module")
def core(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    return Environment(tmp_path_factory.mktemp("core"), wheel)


def contents(wheel: Path) -> dict[str, str]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: hashlib.sha256(archive.read(name)).hexdigest() for name in archive.namelist()}


def test_wheel_holds_every_source_file_and_one_start_up_file(wheel: Path) -> None:
    parents = zip((ROOT, ROOT / "producer", ROOT / "integrations/swift"), PACKAGES, strict=True)
    files = ((parent, path) for parent, package in parents for path in (parent / package).rglob("*.py"))
    sources = {path.relative_to(parent).as_posix() for parent, path in files}
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
    if editable:
        code = "import sys; from hatchling.build import build_editable; print(build_editable(sys.argv[1]))"
        wheel = tmp_path / run_checked([sys.executable, "-c", code, tmp_path], checkout).split()[-1]
    environment = Environment(tmp_path / "environment", "--no-deps", wheel)
    (installed,) = environment.folder.glob(f"lib/python*/site-packages/{PTH}")
    done = environment.python(FINDERS)
    assert (done.stdout, done.stderr) == ("['function']\n", "")
    swift = tmp_path / "swift"  # In a child, and with a module of ms-swift's name in place
    swift.mkdir()
    (swift / "__init__.py").write_text(FINDERS)
    child = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import swift"
    code = f"import subprocess, sys; print(subprocess.check_output([sys.executable, '-c', {child!r}]))"
    done = environment.python(code)
    assert (done.stdout, done.stderr) == ("b\"['function']\\n\"\n", "")
    if editable:  # That of a checkout which is gone does no harm, and says so
        shutil.rmtree(checkout)
        done = environment.python(child)
        assert (done.returncode, done.stdout) == (0, "[]\n")
        assert f"site-packages/{PTH}" in done.stderr
        assert "No module named 'lazyshard_swift'" in done.stderr
    environment.install("uninstall", "lazyshard")
    assert not installed.exists()
    done = environment.python(FINDERS)
    assert (done.stdout, done.stderr) == ("[]\n", "")


TESTS: Final = (  # One file of each room, that which leans most on what changes between versions
    "tests/format/test_seal.py",
    "tests/plan/test_deal.py",
    "tests/stream/test_arrays.py",
    "tests/test_errors.py",
)

SMOKE: Final = """
import sys
from pathlib import Path
import lazyshard
assert Path(lazyshard.__file__).is_relative_to(sys.prefix), lazyshard.__file__
with lazyshard.ChunkWriter("stream", samples_per_chunk=2) as writer:
    for number in range(5):
        writer.write({"number": number})
print(*(row["number"] for row in lazyshard.StreamReader("stream")))
"""


@cache
def pythons() -> dict[str, Path]:
    """Interpreters of this machine by version, pyenv's first, as scripts/test_pythons looks for them."""
    versions = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"), "versions")
    places = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])  # At least this one
    found: dict[str, Path] = {}
    for version in PYTHONS:
        others = shutil.which(f"python{version}", path=places)
        for candidate in (*versions.glob(f"{version}.*/bin/python{version}"), others):
            if candidate and run([candidate, "-I", "-c", "import ensurepip, venv"], ROOT).returncode == 0:
                found.setdefault(version, Path(candidate))
    return found


def lowest(metadata: email.message.Message) -> str:
    """Returns as pip's constraints the lowest versions that a wheel admits."""
    required = "\n".join(metadata.get_all("Requires-Dist", []))
    found = re.findall(r"^([\w-]+)>=([\d.]+)", required, re.MULTILINE)
    assert ("numpy", "1.24") in found
    return "".join(f"{package}=={version}\n" for package, version in sorted(set(found)))


@pytest.mark.parametrize("end", ["oldest", "newest"])
def test_wheel_runs_and_passes_tests(end: str, wheel: Path, metadata: email.message.Message, tmp_path: Path) -> None:
    if end == "newest" and len(pythons()) == 1:
        pytest.skip(f"this machine has Python {next(iter(pythons()))} alone")
    versions = ROOT / "scripts/locked.txt"
    if end == "oldest":
        versions = tmp_path / "lowest.txt"
        versions.write_text(lowest(metadata))
    packages: list[str | Path] = ["-c", versions, f"{wheel}[producer,cli]", "hypothesis", "pytest", "pytest-timeout"]
    python = list(pythons().values())[0 if end == "oldest" else -1]
    environment = Environment(tmp_path / "environment", *packages, python=python)
    if end == "oldest":
        assert environment.python("import numpy; print(numpy.__version__)").stdout.startswith("1.24.")
    done = environment.python(SMOKE, "-W", "error")
    assert (done.stdout, done.stderr) == ("0 1 2 3 4\n", "")
    (environment.folder / "rows.jsonl").write_text("".join(f'{{"number":{number}}}\n' for number in range(5)))
    arguments = ["--source", "rows.jsonl", "--out", "again", "--samples-per-chunk", "2", "--no-progress"]
    for command in (["lazyshard-producer", "run", *arguments], ["lazyshard", "verify", "again"]):
        assert environment.command(*command).returncode == 0
    for name in ("chunk_00000.jsonl", "chunk_00002.jsonl"):
        again, first = (environment.folder / folder / name for folder in ("again", "stream"))
        assert again.read_bytes() == first.read_bytes()
    copy = tmp_path / "copy"
    shutil.copytree(ROOT / "tests", copy / "tests", ignore=shutil.ignore_patterns("__pycache__", "written"))
    shutil.copytree(ROOT / "docs", copy / "docs")
    shutil.copy(ROOT / "pyproject.toml", copy)
    done = run([environment.bin / "python", "-m", "pytest", "-q", "--tier", "quick", *TESTS], copy)
    assert done.returncode == 0, f"{python}:\n{done.stdout}\n{done.stderr}"
    assert " passed" in done.stdout.splitlines()[-1]


@pytest.mark.timeout(900)
def test_data_sets_pass_their_tests_on_the_lowest_torch(tmp_path: Path) -> None:
    variables = uv().variables | {"UV_OFFLINE": "1"}
    python = tmp_path / "venv/bin/python"
    run_checked([uv().uv, "venv", tmp_path / "venv"], tmp_path, variables)
    packages = environment_script().LOWEST[1:]
    if run([uv().uv, "pip", "install", "--python", python, *packages], tmp_path, variables).returncode:
        pytest.skip("the lowest torch is not at hand: it, or a package that it needs, is not in uv's cache")
    done = run([ROOT / "scripts/test_pythons", "torch"], ROOT, variables)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
