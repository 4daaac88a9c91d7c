"""What hatchling cannot take from pyproject.toml as it stands: the description of the package for an index.

An index shows the README without the repository around it, so links to files of the repository would lead nowhere
there. They become the names of those files, which the source distribution holds.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

_FENCE = "```"
_LINK = re.compile(r"\[([^\[\]]+)\]\((?![a-z]+:|#)([^()\s#]+)(?:#[^()\s]*)?\)")
"""An inline link whose target has no scheme and is not an anchor of the same page: its text, and its path."""


def without_relative_links(text: str) -> str:
    """Returns Markdown in which links to files are the names of those files; what is fenced as code stays.

    >>> without_relative_links("[docs/a.md](docs/a.md), [the guide](docs/b.md#x), [us](https://example.org)")
    'docs/a.md, the guide (docs/b.md), [us](https://example.org)'
    """
    fenced = False
    lines = []
    for line in text.splitlines(keepends=True):
        if line.startswith(_FENCE):
            fenced = not fenced
        lines.append(line if fenced else _LINK.sub(_named, line))
    return "".join(lines)


def _named(link: re.Match[str]) -> str:
    text, path = link[1], link[2]
    return text if text.strip("`") == path else f"{text} ({path})"


class Description(MetadataHookInterface):
    """Sets `readme`, which pyproject.toml names as dynamic."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Puts the README there, as an index is to show it."""
        text = Path(self.root, "README.md").read_text(encoding="utf-8")
        metadata["readme"] = {"content-type": "text/markdown", "text": without_relative_links(text)}
