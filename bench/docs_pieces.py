"""What the generated pages are made of: numbers, tables, headers."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

Json = dict[str, Any]

NOTICE = "<!-- Written by `python -m bench.docs` from bench/results/*.json. Do not edit. -->"
NONE = "-"


def filled(name: str, **parts: str) -> str:
    """The text of a page: the template of this name in this folder, with parts in place of their {names}."""
    text = Path(__file__).with_name(name).read_text("utf-8")
    for part, value in parts.items():
        text = text.replace(f"{{{part}}}", value)
    return f"{NOTICE}\n\n{text}"


def number(value: float | None, digits: int) -> str:
    """A number with fixed digits, or a dash."""
    return NONE if value is None or not math.isfinite(value) else f"{value:.{digits}f}"


def shown(value: Any) -> str:
    """A cell: text, a count, or a dash for None."""
    return NONE if value is None else str(value)


def table(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """A Markdown table: the first column to the left, the others to the right. Columns that hold nothing
    are left out."""
    body = [[shown(cell) for cell in row] for row in rows]
    assert all(len(row) == len(columns) for row in body), columns
    kept = [i for i in range(len(columns)) if i == 0 or any(row[i] != NONE for row in body)]
    lines = [[columns[i] for i in kept], ["---" if i == 0 else "---:" for i in kept]]
    lines += [[row[i] for i in kept] for row in body]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


#: Titles, and what a row has under them.
Columns = Mapping[str, Callable[[Json], Any]]


def listing(rows: Iterable[Json], columns: Columns) -> str:
    """A table with a line for each row."""
    return table(tuple(columns), ([cell(row) for cell in columns.values()] for row in rows))


def named(title: str, column: str = "key") -> Columns:
    """The column of the names of rows."""
    return {title: lambda row: row[column]}


def fixed(group: str, digits: int, titles: Mapping[str, str], scale: float = 1.0) -> Columns:
    """Columns of `row[group][name]` over `scale`, by name, with their titles."""

    def cell(name: str) -> Callable[[Json], str]:
        return lambda row: number(None if (x := get(row, group, name)) is None else x / scale, digits)

    return {title: cell(name) for name, title in titles.items()}


Rows = Sequence[Json]


def grouped(rows: Iterable[Json], name: Callable[[Json], Any]) -> dict[Any, list[Json]]:
    """Rows by name, in the order of the first of each."""
    found: dict[Any, list[Json]] = {}
    for row in rows:
        found.setdefault(name(row), []).append(row)
    return found


def summary(title: str, groups: Mapping[Any, Rows], columns: Mapping[str, Callable[[Rows], Any]]) -> str:
    """A table with a line for each group of rows: its name under `title`, and what the columns say of it."""
    body = ([name, *(cell(rows) for cell in columns.values())] for name, rows in groups.items())
    return table((title, *columns), body)


def of(
    statistic: Callable[[Sequence[float]], float | None], value: Callable[[Json], float | None]
) -> Callable[[Rows], str]:
    """A column of `summary`: a statistic, such as the median, of what is known of the rows of a group."""

    def cell(rows: Rows) -> str:
        found = [x for row in rows if (x := value(row))]
        return number(statistic(found) if found else None, 2)

    return cell


def total(column: str) -> Callable[[Rows], Any]:
    """A column of `summary`: the sum of a column of the rows."""
    return lambda rows: sum(row.get(column, 0) for row in rows)


def folded(title: str, *parts: str) -> str:
    """Parts that a reader opens."""
    return "\n\n".join([f"<details><summary>{title}</summary>", *parts, "</details>"])


def header(data: Json) -> str:
    """Device, versions, commit, clocks, date and commands of a file of results; several are folded up."""
    versions = [
        f"{name} {data[name]}"
        for name in ("torch", "triton", "transformers", "inductor_fusions", "python", "cuda", "cudnn")
        if data.get(name) is not None
    ]
    clocks = data.get("clocks_mhz") or {}
    if clocks.get("sm", 0) < clocks.get("max.sm", 0) / 2:  # read while the device was idle
        clocks = {name: value for name, value in clocks.items() if name.startswith("max.")}
    facts = [f"device: {data.get('device', '?')}", f"versions: {', '.join(versions)}"]
    if clocks:
        facts.append("clocks in MHz: " + ", ".join(f"{name} {value}" for name, value in clocks.items()))
    date = data.get("date", "?")
    commit = data.get("commit")
    facts.append(f"commit of the last run: {commit}, {date}" if commit else f"date: {date}")
    lines = [f"- {'; '.join(facts)}"]
    commands = [c for c in (*data.get("previous_commands", ()), data.get("command")) if c]
    # Where the file lay on the machine that measured it says nothing here.
    commands = [re.sub(r"(?<=\s)/\S*/", "", command) for command in commands]
    items = [f"`{command}`" for command in dict.fromkeys(commands)]
    lines += [f"- command: {item}" for item in items] if len(items) == 1 else []
    settings = data.get("settings")
    if settings:
        lines.append("- settings: " + ", ".join(f"`{name}={value}`" for name, value in settings.items()))
    if len(items) > 1:
        folded = [f"- {item}" for item in items]
        lines += ["", f"<details><summary>{len(items)} commands</summary>", "", *folded, "", "</details>"]
    return "\n".join(lines)


def anchor(title: str) -> str:
    """A heading as links name it."""
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")


def section(title: str, data: Json, *parts: str) -> str:
    """A section about a file of results: heading, where it was measured, and its parts that are not ""."""
    return "\n\n".join([f"## {title}, {data.get('device', '?')}", header(data), *filter(None, parts)])


def out_of_budget(rows: Iterable[Json], column: str = "key") -> str:
    """One sentence that names the rows which are not correct."""
    wrong = [str(row[column]) for row in rows if row.get("correct") is False]
    return f"Out of the error budget: {'; '.join(wrong) or 'none'}."


def get(row: Json, table_name: str, name: str) -> float | None:
    """`row[table_name][name]`, or None."""
    value = (row.get(table_name) or {}).get(name)
    return float(value) if isinstance(value, (int, float)) else None


def baseline(row: Json, times: str = "median_ms") -> str:
    """The variant that a whole model's gain is stated against: the faster one of stock and stock under
    max-autotune, where both were measured."""
    found = {name: time for name in ("stock", "autotuned") if (time := get(row, times, name))}
    return min(found, key=found.__getitem__, default="stock")


def quotient(row: Json, above: str, below: str, times: str = "times_us") -> float | None:
    """Quotient of the times of two variants."""
    first, second = get(row, times, above), get(row, times, below)
    return first / second if first is not None and second else None
