"""The built wheel, and what a user gets from it in an environment with nothing else."""

import hashlib
import os
import shutil
import subprocess
import sys
import venv
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import pytest

ROOT: Final = Path(__file__).resolve().parents[2]
PACKAGES: Final = ("lazyshard", "lazyshard_producer", "lazyshard_swift")
PTH: Final = "lazyshard_swift.pth"

# Building takes seconds; installing from a slow package index takes minutes.
pytestmark = [pytest.mark.full, pytest.mark.timeout(300)]


def run(command: Sequence[str | Path], cwd: Path) -> "subprocess.CompletedProcess[str]":
    """Run outside the source tree, with no variable that could let it be imported from there."""
    env = {name: value for name, value in os.environ.items() if name not in {"PYTHONPATH", "PYTHONHOME"}}
    # No wrapping and no colours in what the commands print.
    env.update(COLUMNS="120", NO_COLOR="1", TERM="dumb")
    return subprocess.run(
        list(map(str, command)), cwd=cwd, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )


def run_checked(command: Sequence[str | Path], cwd: Path) -> str:
    done = run(command, cwd)
    assert done.returncode == 0, f"{command} exited {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


class Environment:
    """A virtual environment that holds the wheel, some of its extras, and what those require."""

    def __init__(self, folder: Path, *requirements: str) -> None:
        self.folder = folder
        self.bin = folder / "bin"
        venv.create(folder, symlinks=True)
        self.pip("install", "-q", *requirements)

    def pip(self, *arguments: str) -> None:
        pip = [sys.executable, "-m", "pip", "--python", str(self.bin / "python"), "--no-input"]
        run_checked([*pip, *arguments], self.folder)

    def python(self, code: str) -> "subprocess.CompletedProcess[str]":
        return run([self.bin / "python", "-I", "-c", code], self.folder)

    def command(self, name: str, *arguments: str) -> "subprocess.CompletedProcess[str]":
        return run([self.bin / name, *arguments], self.folder)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    run_checked([sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", folder, ROOT], folder)
    (path,) = folder.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def core(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    return Environment(tmp_path_factory.mktemp("core"), str(wheel))


@pytest.fixture(scope="module")
def producer(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    return Environment(tmp_path_factory.mktemp("producer"), f"{wheel}[producer]")


def contents(wheel: Path) -> dict[str, str]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: hashlib.sha256(archive.read(name)).hexdigest() for name in archive.namelist()}


def test_wheel_installs_three_names_and_one_start_up_file(wheel: Path) -> None:
    tops = {name.partition("/")[0] for name in contents(wheel)}
    assert {top for top in tops if not top.endswith(".dist-info")} == {*PACKAGES, PTH}
    assert len(tops) == len(PACKAGES) + 2


@pytest.mark.parametrize("package", PACKAGES)
def test_package_in_wheel_is_typed_and_has_sources(wheel: Path, package: str) -> None:
    assert {f"{package}/__init__.py", f"{package}/py.typed"} <= set(contents(wheel))


def test_wheel_holds_every_source_file(wheel: Path) -> None:
    sources = {
        path.relative_to(parent).as_posix()
        for parent, package in zip((ROOT, ROOT / "producer", ROOT / "integrations/swift"), PACKAGES, strict=True)
        for path in (parent / package).rglob("*.py")
    }
    assert sources == {name for name in contents(wheel) if name.endswith(".py")}


@pytest.mark.parametrize("kind", ["html", "css", "js"])
def test_wheel_holds_the_page_of_watch(wheel: Path, kind: str) -> None:
    page = (ROOT / f"lazyshard/cli/watch_page.{kind}").read_bytes()
    assert contents(wheel)[f"lazyshard/cli/watch_page.{kind}"] == hashlib.sha256(page).hexdigest()


def test_sdist_builds_the_same_wheel(wheel: Path, tmp_path: Path) -> None:
    # Without --wheel, `build` makes the sdist and then the wheel from it.
    run_checked([sys.executable, "-m", "build", "--no-isolation", "--outdir", tmp_path, ROOT], tmp_path)
    (rebuilt,) = tmp_path.glob("*.whl")
    assert contents(rebuilt) == contents(wheel)


def test_import_without_torch(core: Environment) -> None:
    done = core.python("import importlib.util, lazyshard; print(importlib.util.find_spec('torch'))")
    assert (done.returncode, done.stdout, done.stderr) == (0, "None\n", "")


def test_import_comes_from_the_wheel(core: Environment) -> None:
    done = core.python("import lazyshard; print(lazyshard.__file__)")
    assert Path(done.stdout.strip()).is_relative_to(core.folder), done.stderr


@pytest.mark.parametrize("name", ["ChunkWriter", "StreamReader"])
def test_public_name_without_torch(core: Environment, name: str) -> None:
    done = core.python(f"import lazyshard; print(lazyshard.{name}.__name__)")
    assert (done.returncode, done.stdout) == (0, f"{name}\n"), done.stderr


def test_dataset_without_torch_names_the_extra(core: Environment) -> None:
    code = "import lazyshard\ntry:\n    lazyshard.LazyShardedDataset\nexcept ImportError as error:\n    print(error)"
    done = core.python(code)
    assert done.returncode == 0, done.stderr
    assert "lazyshard[torch]" in done.stdout


@pytest.mark.parametrize(
    ("command", "extra"), [("lazyshard-producer", "lazyshard[producer]"), ("lazyshard", "lazyshard[cli]")]
)
def test_command_without_its_extra_names_it_in_one_line(core: Environment, command: str, extra: str) -> None:
    done = core.command(command, "--help")
    assert done.returncode != 0
    assert done.stdout == ""
    assert extra in done.stderr
    assert done.stderr.count("\n") == 1, done.stderr


@pytest.mark.parametrize("arguments", [["--help"], ["run", "--help"]])
def test_producer_command_with_its_extra(producer: Environment, arguments: list[str]) -> None:
    done = producer.command("lazyshard-producer", *arguments)
    assert done.returncode == 0, done.stderr
    assert "usage" in done.stdout.lower()


def test_producer_extra_brings_no_torch(producer: Environment) -> None:
    done = producer.python("import torch")
    assert done.returncode == 1
    assert "ModuleNotFoundError" in done.stderr


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
def test_start_up_file_comes_and_goes_with_the_package(
    editable: bool, wheel: Path, checkout: Path, tmp_path: Path
) -> None:
    package = editable_wheel(checkout, tmp_path) if editable else wheel
    environment = Environment(tmp_path / "environment", "--no-deps", str(package))
    (installed,) = environment.folder.glob(f"lib/python*/site-packages/{PTH}")
    done = environment.python(FINDERS)
    assert (done.stdout, done.stderr) == ("['function']\n", "")
    # In a child, and with a module of ms-swift's name in place.
    swift = tmp_path / "swift"
    swift.mkdir()
    (swift / "__init__.py").write_text(FINDERS)
    code = f"""
import subprocess, sys
child = "import sys; sys.path.insert(0, {str(tmp_path)!r}); import swift"
print(subprocess.run([sys.executable, "-c", child], capture_output=True, text=True, check=True))
"""
    done = environment.python(code)
    assert "stdout=\"['Finder']\\n\", stderr=''" in done.stdout, done
    environment.pip("uninstall", "-q", "-y", "lazyshard")
    assert not installed.exists()
    done = environment.python(FINDERS)
    assert (done.stdout, done.stderr) == ("[]\n", "")


def test_start_up_file_of_a_checkout_that_is_gone_does_no_harm_and_says_so(checkout: Path, tmp_path: Path) -> None:
    environment = Environment(tmp_path / "environment", "--no-deps", str(editable_wheel(checkout, tmp_path)))
    shutil.rmtree(checkout)
    (tmp_path / "swift.py").write_text("value = 1\n")
    done = environment.python(f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import swift; print(swift.value)")
    assert (done.returncode, done.stdout) == (0, "1\n")
    assert f"site-packages/{PTH}" in done.stderr
    assert "No module named 'lazyshard_swift'" in done.stderr


def test_doctor_without_ms_swift(producer: Environment) -> None:
    # The requirements of the command are those of the producer's.
    done = producer.command("lazyshard", "doctor", "swift")
    assert (done.returncode, done.stderr) == (1, "")
    lines = [" ".join(line.split()) for line in done.stdout.splitlines()]
    assert "NOT OK ms-swift not installed: pip install 'ms-swift>=4.0,<4.7'" in lines
    assert "ok finder active in this interpreter" in lines
    assert "NOT OK megatron sft --sharded_lazy true cannot start: ms-swift is not installed" in lines
