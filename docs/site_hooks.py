"""Hooks of mkdocs: pages of the repository's root are pages of the site, and links between them hold.

A link to a file that is no page (code, a table of results) keeps its text alone: the site has no such file.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
#: File of the repository -> page of the site.
PAGES = {"README.md": "index.md", "CONTRIBUTING.md": "CONTRIBUTING.md", "CHANGELOG.md": "CHANGELOG.md"}

_LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\[\]]*\])*)\]\(([^()\s]+)\)")


def on_files(files: Files, config: Any) -> Files:
    """Add the pages of the root."""
    for name, page in PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / name).read_text()))
    return files


def on_page_markdown(markdown: str, page: Any, files: Files, **_: Any) -> str:
    """Make links relative to the site."""
    folder = "" if page.file.src_uri in PAGES.values() else "docs"

    def moved(link: re.Match[str]) -> str:
        image, text, address = link.groups()
        path, hash_, anchor = address.partition("#")
        if not path or ":" in path:
            return link.group()
        target = posixpath.normpath(posixpath.join(folder, path))
        target = PAGES.get(target, target.removeprefix("docs/"))
        if files.get_file_from_path(target) is None:
            return text
        return f"{image}[{text}]({target}{hash_}{anchor})"

    return _LINK.sub(moved, markdown)
