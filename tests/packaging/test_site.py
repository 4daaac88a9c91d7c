"""The documentation site: built strictly, complete, from this checkout alone."""

import importlib
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

import pytest
import typer.main
import yaml

import lazyshard
import lazyshard.data
import lazyshard.stream
from scripts.pages.site_hooks import with_site_links
from tests.harness.processes.environment import environment
from tests.packaging.test_import_directions import ROOT

pytest.importorskip("mkdocs", reason="the extra docs is not installed")

DOCS: Final = ROOT / "docs"

pytestmark = pytest.mark.timeout(180)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    built = ["build", "--strict", "--config-file", str(ROOT / "mkdocs.yml"), "--site-dir", str(folder)]
    env = environment() | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run([sys.executable, "-m", "mkdocs", *built], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder


class Loader(yaml.SafeLoader):  # type: ignore[misc]
    """Reads mkdocs.yml without making the objects that it names."""


Loader.add_multi_constructor("tag:yaml.org,2002:python/", lambda loader, suffix, node: suffix)


def in_nav(entry: Any) -> list[str]:
    if isinstance(entry, str):
        return [entry]
    children = entry.values() if isinstance(entry, dict) else entry
    return [path for child in children for path in in_nav(child)]


def test_every_page_is_in_the_nav() -> None:
    paths = in_nav(yaml.load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"), Loader)["nav"])  # noqa: S506
    assert [path for path in paths if paths.count(path) > 1] == []
    missing = {str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md")} - set(paths)
    assert not missing, f"add to the nav in mkdocs.yml: {sorted(missing)}"


@pytest.mark.full
def test_nothing_is_fetched_from_elsewhere(site: Path) -> None:  # By a browser by itself, for a page or a style sheet
    pages = sorted(site.rglob("*.html"))
    assert len(pages) >= 40
    elsewhere = re.compile(r"([a-z]+:)?//")
    for page in pages:
        tags = re.findall(
            r"<(?:script|img|iframe|source|video|audio|embed|object|link)\b[^>]*>", page.read_text(encoding="utf-8")
        )
        fetched = [tag for tag in tags if not re.search(r'\brel="?(canonical|prev|next)\b', tag)]
        urls = [url for tag in fetched for url in re.findall(r'\b(?:src|data|href)="?([^"\s>]+)', tag)]
        assert urls, f"{page.name}: a page without a style sheet: assets are no longer found"
        assert [url for url in urls if elsewhere.match(url)] == [], page.name
    styles = [style.read_text(encoding="utf-8") for style in site.rglob("*.css")]
    assert styles
    fetched = [url for style in styles for url in re.findall(r"url\(\s*[\"']?([^)\"']+)", style)]
    fetched += [url for style in styles for url in re.findall(r"@import\s+[\"']([^\"']+)", style)]
    assert [url for url in fetched if elsewhere.match(url)] == []


@pytest.mark.full
def test_pages_are_understood_as_they_are_on_a_forge(site: Path) -> None:
    """No paragraph or cell still holds marks of lists, links, blocks or tables."""
    for page in site.rglob("*.html"):
        article = page.read_text(encoding="utf-8").partition("<article")[2].partition("</article>")[0]
        text = re.sub(r"<pre.*?</pre>|<code>.*?</code>", "", article, flags=re.DOTALL)
        parts = [part for _, part in re.findall(r"<(p|li|td)>(.*?)</\1>", text, re.DOTALL)]
        found = [part[:80] for part in parts if re.search(r"\n *(-|\*|\d+\.) |```|\]\(|\|---", part)]
        assert found == [], f"{page.name}: put an empty line before it, and see whether brackets are closed"


@pytest.mark.full
def test_every_public_name_is_in_the_reference(site: Path) -> None:
    shown = " ".join(page.read_text(encoding="utf-8") for page in sorted((site / "reference").glob("*.html")))
    anchors = set(re.findall(r'id="([\w.]+)"', shown))
    names = [
        *(f"lazyshard.{name}" for name in lazyshard.__all__ if name not in ("LazyShardError", "errors")),
        *(f"lazyshard.data.{name}" for name in lazyshard.data.__all__ if name not in lazyshard.__all__),
        *(f"lazyshard.stream.{name}" for name in lazyshard.stream.__all__ if name not in lazyshard.__all__),
        *(f"lazyshard.errors.{name}" for name, found in vars(lazyshard.errors).items() if isinstance(found, type)
          and issubclass(found, lazyshard.LazyShardError)),
    ]  # fmt: skip
    assert len(names) >= 60
    missing = [name for name in names if name not in anchors]
    assert not missing, f"add `::: NAME` to a page of docs/reference for each of {missing}"


@pytest.mark.parametrize("command", ["lazyshard", "lazyshard-producer"])
@pytest.mark.full
def test_every_option_of_a_command_is_in_its_reference(site: Path, command: str) -> None:
    shown = (site / "reference" / f"{command}.html").read_text(encoding="utf-8")
    application = {"lazyshard": "lazyshard.cli.command", "lazyshard-producer": "lazyshard_producer.command"}[command]
    commands: dict[str, Any] = getattr(typer.main.get_command(importlib.import_module(application).app), "commands")  # noqa: B009
    assert len(commands) >= 4
    options = 0
    for name, made in commands.items():
        _, _, section = shown.partition(f'<h2 id="{command}-{name}">')
        section = section.partition("<h2 ")[0]
        assert section, f"no section for {command} {name}"
        for parameter in made.params:
            if parameter.param_type_name == "option" and not parameter.hidden:
                options += 1
                missing = [option for option in parameter.opts if f"<code>{option}" not in section]
                assert not missing, f"{command} {name}: {missing}"
    assert options >= 20


@pytest.mark.parametrize(
    ("text", "source", "page", "repository", "expected"),
    [
        ("[CONTRIBUTING.md](../CONTRIBUTING.md)", "docs/a.md", "a.md", None, "[Contributing](contributing.md)"),
        ("[b](b.md#c)", "docs/a.md", "a.md", None, "[b](b.md#c)"),
        ("[b](../b.md)", "docs/r/a.md", "r/a.md", None, "[b](../b.md)"),
        ("[`x.json`](../p/x.json)", "docs/a.md", "a.md", None, "`p/x.json`"),
        ("[a dashboard](../p/x.json)", "docs/a.md", "a.md", None, "a dashboard (`p/x.json`)"),
        ("[x](../p/x.json)", "docs/a.md", "a.md", "https://e.org/us/", "[x](https://e.org/us/blob/HEAD/p/x.json)"),
        ("[f](docs/format.md#x)", "CHANGELOG.md", "changelog.md", None, "[f](format.md#x)"),
        ("[us](https://e.org) [here](#x)", "docs/a.md", "a.md", None, "[us](https://e.org) [here](#x)"),
        ("![p](pictures/p.svg)", "docs/a.md", "a.md", None, "![p](pictures/p.svg)"),
        ("```\n[x](../y)\n```\n", "docs/a.md", "a.md", None, "```\n[x](../y)\n```\n"),
    ],
)
def test_links_out_of_docs(text: str, source: str, page: str, repository: str | None, expected: str) -> None:
    assert with_site_links(text, source, page, repository) == expected
