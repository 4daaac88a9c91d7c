"""The guides and `docs/comparison.md`: their links lead somewhere, and figures are those of `docs/performance.md`."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from tests.packaging.guide_programs import GUIDES, ROOT, blocks, variables

COMPARISON: Final = ROOT / "docs" / "comparison.md"
PAGES: Final = [*sorted(GUIDES.glob("*.md")), COMPARISON]


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub and mkdocs make them of plain words."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def dead_links(page: Path) -> list[str]:
    """Links to files that are not there, or to headings that the page they lead to does not have."""
    found = []
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if link.startswith("https://"):
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            found.append(link)
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_lead_somewhere(page: Path) -> None:
    assert dead_links(page) == []


def test_a_link_to_a_heading_that_is_not_there_is_found(tmp_path: Path) -> None:
    (tmp_path / "b.md").write_text("# One `two`, three\n\n```\n# four\n```\n", encoding="utf-8")
    page = tmp_path / "a.md"
    page.write_text("[a](b.md#one-two-three) [b](b.md#four) [c](c.md) [d](https://example.org) [e](#x)\n")
    assert dead_links(page) == ["b.md#four", "c.md", "#x"]


@pytest.mark.parametrize("page", sorted(GUIDES.glob("*.md")), ids=lambda page: page.stem)
def test_a_guide_says_what_comes_of_it_then_what_to_watch_then_what_differs(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    _, begin, *_ = text.split("\n\n")
    assert re.match(r"At the end of this page", begin)
    headings = re.findall(r"^## (.+)$", text, re.MULTILINE)
    assert headings[-2] == "What to watch"
    assert headings[-1].startswith("What is different")


def test_speeds_are_those_that_were_measured() -> None:
    performance = (ROOT / "docs" / "performance.md").read_text(encoding="utf-8")
    of_a, of_b = re.findall(r"^\| [AB] \| rows/s in order .*?\n\n", performance, re.MULTILINE | re.DOTALL)
    names = {
        "lazyshard, `LateRow`": "**lazyshard, late**",
        "lazyshard": "**lazyshard**",
        "LitData": "litdata",
        "WebDataset": "webdataset",
        "MosaicML streaming": "MosaicML streaming",
        "Megatron Energon": "megatron-energon",
        "torchdata over a minimal data set": "torchdata",
    }
    _, _, section = COMPARISON.read_text(encoding="utf-8").partition("\n| | text | images |\n|---|---|---|\n")
    rows = re.findall(r"^\| (.+?) \| ([\d,]+) \| ([\d,]+) \|$", section.partition("\n\n")[0], re.MULTILINE)
    assert len(rows) == 10
    for name, text, images in rows:
        known = re.escape(names.get(name, name))
        version = r"(?: [\d.]+)?(?: over minimal)?"
        assert re.search(rf"^\| {known}{version} \| {text} \|", of_a, re.MULTILINE), name
        assert re.search(rf"^\| {known}{version} \| {images} \|", of_b, re.MULTILINE), name


def test_lines_of_the_filesystem_check_are_those_that_it_prints() -> None:
    text = (GUIDES / "multi-node.md").read_text(encoding="utf-8")
    _, _, table = text.partition("| line | if it is not `ok` |\n|---|---|\n")
    rows = table.partition("\n\n")[0].splitlines()
    lines = [line for row in rows for line in re.findall(r"`([^`]+)`", row.split("|")[1])]
    assert len(lines) == 7
    printed = (ROOT / "docs" / "filesystems.md").read_text(encoding="utf-8")
    assert [line for line in lines if not re.search(rf"^\w+ +{re.escape(line)} {{2}}", printed, re.MULTILINE)] == []


def test_commands_of_the_guides_have_the_options_that_they_are_given() -> None:
    named = {"torchrun": "torch.distributed.run", "lazyshard-producer run": "lazyshard_producer run"}
    for command, module in named.items():
        help_of = [sys.executable, "-m", *module.split(), "--help"]
        known = subprocess.run(help_of, env=variables(), capture_output=True, text=True, timeout=120).stdout
        found = 0
        for page in GUIDES.glob("*.md"):
            for block in blocks(page.name, ""):
                for line in block.replace("\\\n", " ").splitlines():
                    if line.startswith(command):
                        found += 1
                        words = re.findall(r"(?<= )--[\w-]+", line)
                        assert [word for word in words if word not in known] == [], f"{page.name}: {line}"
        assert found
