"""docs/measurements.html, a page of every table with columns that sort; and the rows of operations as CSV."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from bench.docs_pieces import anchor

TEMPLATE = Path(__file__).with_name("measurements.html")


@dataclass(frozen=True)
class Table:
    """A table of a section.

    Attributes:
        columns: their titles.
        rows: as many cells each, as they are shown.
    """

    columns: list[str]
    rows: list[list[str]]

    def csv(self) -> str:
        """The table for other programs. A number and its spread after ± are two columns."""
        spread = [any("±" in row[i] for row in self.rows) for i in range(len(self.columns))]
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(_parted(self.columns, spread, "± "))
        writer.writerows(_parted(row, spread) for row in self.rows)
        return text.getvalue()


def _parted(cells: Sequence[str], spread: Sequence[bool], prefix: str | None = None) -> Iterator[str]:
    for cell, two in zip(cells, spread, strict=True):
        value, _, error = cell.partition("±")
        yield "" if value.strip() == "-" else value.strip()
        if two:
            yield error.strip() if prefix is None else f"{prefix}{cell}"


def tables(section: str) -> list[Table]:
    """The tables of a section in Markdown, in its order."""
    found = []
    for lines in re.findall(r"(?:^\|.*\|\n?)+", section, re.M):
        columns, _, *rows = ([cell.strip() for cell in line[1:-1].split("|")] for line in lines.splitlines())
        found.append(Table(columns, rows))
    return found


def rows_of(section: str) -> str:
    """The largest table of a section as CSV, or ""."""
    return max(tables(section), key=lambda table: len(table.rows)).csv() if tables(section) else ""


def short(section: str, kept: Sequence[str]) -> str:
    """A section without its commands, and of its parts those of these titles alone."""
    whole = re.sub(r"^- command: .*\n|<details>(?:.*\n)+?</details>\n\n", "", section, flags=re.M)
    first, *parts = re.split(r"^(?=### )", whole, flags=re.M)
    return "".join([first, *(p for p in parts if p.partition("\n")[0][4:] in kept)]).rstrip()


def page(sections: Sequence[str]) -> str:
    """The text of docs/measurements.html."""
    titles = [section.partition("\n")[0].removeprefix("## ") for section in sections]
    contents = "\n".join(f'<li><a href="#{anchor(t)}">{escape(t)}</a></li>' for t in dict.fromkeys(titles))
    body = "\n".join(block for section in sections for block in _blocks(section))
    return TEMPLATE.read_text("utf-8").replace("{contents}", contents).replace("{body}", body)


def _blocks(section: str) -> Iterator[str]:
    """A section in HTML, block by block."""
    for block in re.split(r"\n\n+", section):
        lines = block.splitlines()
        if block.startswith("#"):
            level, _, title = block.partition(" ")
            yield f'<h{len(level)} id="{anchor(title)}">{escape(title)}</h{len(level)}>'
        elif block.startswith("|"):
            (table,) = tables(block)
            yield _table(table)
        elif block.startswith("- "):
            yield "<ul>" + "".join(f"<li>{_inline(line[2:])}</li>" for line in lines) + "</ul>"
        elif block.startswith(("<details>", "</details>")):
            yield block
        elif block:
            yield f"<p>{_inline(block)}</p>"


def _table(table: Table) -> str:
    head = "".join(f"<th>{_inline(title)}</th>" for title in table.columns)
    rows = "\n".join(
        "<tr>" + "".join(f"<td>{_inline(cell)}</td>" for cell in row) + "</tr>" for row in table.rows
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>\n{rows}\n</tbody></table>"


def _inline(text: str) -> str:
    """Code and bold type; the rest as it is."""
    text = re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(text))
    return re.sub(r"\*\*([^*]+)\*\*", r"<b>\1</b>", text)
