"""A hook of MkDocs: README is the first page; links to files outside docs/ become their paths."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"(!?)\[([^\]]+)\]\((?!\w+:)([^)#]+)(#[^)]*)?\)")


def on_files(files: Files, *, config: Any) -> Files:
    """Add README as the first page."""
    files.append(File.generated(config, "index.md", content=(ROOT / "README.md").read_text()))
    return files


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Return a page with links that lead to pages of the site, or name a file of the repository."""
    uri = page.file.src_uri
    place = "" if uri == "index.md" else posixpath.join("docs", posixpath.dirname(uri))

    def link(found: re.Match[str]) -> str:
        image, text, path, anchor = found.groups("")
        target = posixpath.normpath(posixpath.join(place, path))
        if target == "README.md":
            target = "docs/index.md"
        if not target.startswith("docs/"):
            return f"{text} (`{target}`)"
        inside = posixpath.relpath(target, posixpath.join("docs", posixpath.dirname(uri)))
        return f"{image}[{text}]({inside}{anchor})"

    return LINK.sub(link, markdown)
