"""What would go to a package index: checked as the index checks it, complete, readable there, and of one version."""

import email
import email.message
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from typing import Final

import pytest
import yaml
from markdown_it import MarkdownIt

from tests.packaging.test_wheel import ROOT, run_checked

PYTHONS: Final = ("3.10", "3.11", "3.12", "3.13")
"""Supported: those that scripts/test_pythons knows."""

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the source distribution and the wheel made of it."""
    folder = tmp_path_factory.mktemp("built")
    run_checked([sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, ROOT], folder)
    return folder


@pytest.fixture(scope="module")
def metadata(built: Path) -> email.message.Message:
    (wheel,) = built.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        return email.message_from_bytes(archive.read(name))


def members(built: Path) -> set[str]:
    """Paths in the source distribution, without its own top folder."""
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        return {member.name.partition("/")[2] for member in archive.getmembers() if member.isfile()}


def test_twine_finds_nothing_wrong(built: Path) -> None:
    done = run_checked([sys.executable, "-m", "twine", "check", "--strict", *sorted(built.iterdir())], built)
    assert done.count("PASSED") == 2, done


def description(metadata: email.message.Message) -> str:
    text = metadata.get_payload(decode=True)
    assert isinstance(text, bytes)
    return text.decode()


def targets(markdown: str) -> list[str]:
    """What the links and pictures of a page lead to."""
    inline = [child for token in MarkdownIt().enable("table").parse(markdown) for child in token.children or ()]
    return [str(value) for token in inline for name, value in token.attrs.items() if name in ("href", "src")]


def test_description_leads_nowhere_that_an_index_does_not_have(metadata: email.message.Message) -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert "docs/format.md" in targets(readme), "the README has no relative link, so this test shows nothing"
    assert [target for target in targets(description(metadata)) if not re.match(r"https?://", target)] == []


def test_description_is_the_readme_but_for_its_links(metadata: email.message.Message) -> None:
    assert metadata["Description-Content-Type"] == "text/markdown"
    readme = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    pairs = list(zip(readme, description(metadata).splitlines(), strict=True))
    assert [(ours, theirs) for ours, theirs in pairs if ours != theirs and "](" not in ours] == []
    assert "- docs/format.md: the stream directory, for those who write a producer or reader in another language" in [
        theirs for _, theirs in pairs
    ]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("see [docs/a.md](docs/a.md).", "see docs/a.md."),
        ("[`docs/a.md`](docs/a.md)", "`docs/a.md`"),
        ("[the guide](docs/a.md#part) and [b](b.md)", "the guide (docs/a.md) and b (b.md)"),
        ("[us](https://example.org/a.md), [below](#part)", "[us](https://example.org/a.md), [below](#part)"),
        ("```\n[a](b)\n```\n[a](b)\n", "```\n[a](b)\n```\na (b)\n"),
        ("f([(a, 1)])", "f([(a, 1)])"),
    ],
)
def test_links_become_names(given: str, expected: str) -> None:
    code = "import sys; from hatch_build import without_relative_links as f; sys.stdout.write(f(sys.argv[1]))"
    assert run_checked([sys.executable, "-c", code, given], ROOT) == expected


def test_licence_comes_along(built: Path, metadata: email.message.Message) -> None:
    assert (metadata["License-Expression"], metadata.get_all("License-File")) == ("Apache-2.0", ["LICENSE"])
    (wheel,) = built.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/licenses/LICENSE")]
        assert archive.read(name) == (ROOT / "LICENSE").read_bytes()


def test_pythons_are_the_same_everywhere(metadata: email.message.Message) -> None:
    prefix = "Programming Language :: Python :: 3."
    classified = [text.rpartition(" ")[2] for text in metadata.get_all("Classifier", []) if text.startswith(prefix)]
    assert classified == list(PYTHONS)
    assert metadata["Requires-Python"] == "<3.14,>=3.10"
    script = (ROOT / "scripts" / "test_pythons").read_text(encoding="utf-8")
    known = re.search(r"^known=\((.*)\)$", script, re.MULTILINE)
    assert known is not None
    assert known[1].split() == list(PYTHONS)


def test_version_is_the_same_everywhere(metadata: email.message.Message) -> None:
    import lazyshard

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
    tracked = git_files()
    assert tracked - members(built) == {".ci/nightly", ".ci/run", ".editorconfig", ".gitattributes"}
    # What somebody is just writing counts as ours.
    ours = tracked | git_files("--others", "--exclude-standard")
    assert members(built) - ours == {"PKG-INFO"}


def test_pre_commit_runs_the_checks_of_the_test_script() -> None:
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))["repos"][0]["hooks"]
    assert [hook["id"] for hook in hooks] == ["ruff-check", "ruff-format", "mypy"]
    script = (ROOT / "scripts" / "test").read_text(encoding="utf-8")
    checks = " ".join(script.replace("\\\n", " ").replace('"$python"', ".venv/bin/python").split())
    for hook in hooks:
        # pre-commit names files that ruff would leave out by itself.
        command = " ".join(hook["entry"].replace("--force-exclude", "").split())
        assert (hook["language"], command in checks) == ("system", True), command
