"""Hooks of mkdocs: pages from outside of docs, pages of the commands, and links that leave docs.

Pages are written for the repository, where `../CONTRIBUTING.md` is a valid link. In the site such a link points to the
page made of the file (`PAGES`), or to the file in the repository if `repo_url` is set in mkdocs.yml, and otherwise
becomes the name of the file.

mkdocs calls the functions whose names begin with `on_`.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from scripts.pages import site_commands

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT: Final = Path(__file__).resolve().parents[2]

PAGES: Final = {
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "README.md": "index.md",
    "examples/README.md": "examples.md",
    "producer/deploy/README.md": "deploy.md",
}
"""Files of the repository that are also pages of the site, by path."""

TAKEN: Final = ("CHANGELOG.md", "CONTRIBUTING.md", "examples/README.md", "producer/deploy/README.md")
"""The files that are added as pages. The content of README is in pages of docs."""

COMMANDS: Final = ("lazyshard", "lazyshard-producer")

_FENCE: Final = "```"
_LINK: Final = re.compile(r"(?<!!)\[([^\[\]]+)\]\((?![a-z]+:|#)([^()\s#]+)(#[^()\s]*)?\)")
"""An inline link to another page, without a scheme: text, path and anchor."""


def with_site_links(text: str, source: str, page: str, repository: str | None) -> str:
    """Returns Markdown with links that work in the site; fenced code is not changed.

    >>> with_site_links("[a](../b.py), [c](c.md#d)", "docs/x.md", "x.md", None)
    'a (`b.py`), [c](c.md#d)'
    >>> with_site_links("[a](../b.py)", "docs/x.md", "x.md", "https://example.org/us")
    '[a](https://example.org/us/blob/HEAD/b.py)'

    Args:
        text: the Markdown.
        source: the path of the file in the repository, by which its links go.
        page: the path of the page in the site.
        repository: where files of the repository are to be seen; None for nowhere.
    """

    def lead(link: re.Match[str]) -> str:
        return _site_link(link, source, page, repository)

    fenced = False
    lines = []
    for line in text.splitlines(keepends=True):
        if line.lstrip().startswith(_FENCE):
            fenced = not fenced
        lines.append(line if fenced else _LINK.sub(lead, line))
    return "".join(lines)


def _site_link(link: re.Match[str], source: str, page: str, repository: str | None) -> str:
    text, target, anchor = link[1], link[2], link[3] or ""
    path = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
    inside = path[len("docs/") :] if path.startswith("docs/") else PAGES.get(path)
    if inside is not None:
        if text.strip("`").endswith(posixpath.basename(target)):
            text = _title_of(path) or text
        return f"[{text}]({posixpath.relpath(inside, posixpath.dirname(page) or '.')}{anchor})"
    if repository is not None:
        return f"[{text}]({repository.rstrip('/')}/blob/HEAD/{path})"
    named = text.strip("`")
    return f"`{path}`" if path.endswith(named) else f"{text} (`{path}`)"


def _title_of(path: str) -> str | None:
    """Returns the heading of a page, by which readers of the site know it, unlike in a repository."""
    try:
        first = (ROOT / path).read_text(encoding="utf-8").partition("\n")[0]
    except FileNotFoundError:
        # Made when the site is built.
        return None
    return first.removeprefix("# ") if first.startswith("# ") else None


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Parses lists as GitHub does: continuation lines are indented to the first word of an entry, not by four."""
    from markdown.blockprocessors import ListIndentProcessor
    from markdown.extensions import Extension
    from markdown.extensions.sane_lists import SaneOListProcessor, SaneUListProcessor

    class Lists(Extension):  # type: ignore[misc,unused-ignore]
        def extendMarkdown(self, md: Any) -> None:
            # Code without a fence, as in docstrings, keeps its four: only these three take the number from here.
            kept, md.tab_length = md.tab_length, 2
            for kind, name, priority in (
                (ListIndentProcessor, "indent", 90),
                (SaneOListProcessor, "olist", 40),
                (SaneUListProcessor, "ulist", 30),
            ):
                md.parser.blockprocessors.register(kind(md.parser), name, priority)
            md.tab_length = kept

    config.markdown_extensions.append(Lists())  # type: ignore[arg-type,unused-ignore]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages from outside of docs."""
    from mkdocs.structure.files import File

    for path in TAKEN:
        text = (ROOT / path).read_text(encoding="utf-8")
        files.append(
            File.generated(config, PAGES[path], content=with_site_links(text, path, PAGES[path], config.repo_url))
        )
    for name in COMMANDS:
        files.append(File.generated(config, f"reference/{name}.md", content=site_commands.page(name)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Converts the links of a page."""
    if page.file.generated_by is not None:
        return markdown
    return with_site_links(markdown, f"docs/{page.file.src_uri}", page.file.src_uri, config.repo_url)


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Removes the second colon before examples in docstrings, which is for other tools."""
    return html.replace("::</p>\n<div", ":</p>\n<div")
