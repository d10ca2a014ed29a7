"""Mutants of the package's source: one node of a function's tree changed, while the module is imported.

As a pytest plugin (`-p tests.mutating`) it reads what to do from the JSON file that MUTATING names:

- `mutant`: the one to make; or `sites`: of each test it is recorded which of them it reaches.
- `tests`: ids of those to run, in that order; or `within`: what the ids of those to run begin with.
"""

from __future__ import annotations

import ast
import builtins
import importlib.abc
import importlib.machinery
import json
import os
import sys
import types
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]

FLIPPED: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
#: Name of what is called where a site is reached.
REACHED = "__reached_by_a_test__"


@dataclass(frozen=True, order=True)
class Site:
    """One mutant.

    Attributes:
        file: relative to the checkout.
        line, column: of the node.
        kind: "left out": a raise, or an early return, continue or break; "flipped": a comparison; "dropped":
            the last operand of an `and` or `or`; "negated": a `not` taken away; "next": an integer that
            is compared or indexed with, one more.
    """

    file: str
    line: int
    column: int
    kind: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}:{self.column} {self.kind}"

    @classmethod
    def parse(cls, text: str) -> Site:
        """What `str` has written."""
        place, _, kind = text.partition(" ")
        file, line, column = place.rsplit(":", 2)
        return cls(file, int(line), int(column), kind)


def kind(node: ast.AST, parent: ast.AST) -> str | None:
    """How a node is mutated; None: it is not."""
    if isinstance(node, ast.Raise) and node.exc is not None and not isinstance(parent, ast.ExceptHandler):
        return "left out"
    if isinstance(node, ast.Return | ast.Continue | ast.Break) and isinstance(parent, ast.If):
        return "left out"
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        return "flipped"
    if isinstance(node, ast.BoolOp):
        return "dropped"
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        return "negated"
    number = isinstance(node, ast.Constant) and type(node.value) is int
    return "next" if number and isinstance(parent, ast.Compare | ast.Subscript) else None


def mutated(node: Any) -> ast.AST:
    """What takes the node's place."""
    if isinstance(node, ast.Compare):
        new: ast.AST = ast.Compare(node.left, [FLIPPED[type(node.ops[0])]()], node.comparators)
    elif isinstance(node, ast.BoolOp):
        rest = node.values[:-1]
        new = rest[0] if len(rest) == 1 else ast.BoolOp(node.op, rest)
    elif isinstance(node, ast.UnaryOp):
        new = node.operand
    elif isinstance(node, ast.Constant):
        new = ast.Constant(node.value + 1)
    else:
        new = ast.Pass()
    return ast.copy_location(new, node)


class Walk(ast.NodeTransformer):
    """Finds the sites of a file, or marks some of them, or makes one mutant."""

    def __init__(self, file: str, mutant: Site | None = None, marks: Sequence[Site] = ()) -> None:
        self.file = file
        self.mutant = mutant
        self.marks = frozenset(marks)
        self.found: list[Site] = []
        self.parents: list[ast.AST] = []
        self.reached: list[Site] = []  # marks in the statement that is being visited

    def visit(self, node: ast.AST) -> Any:
        parent = self.parents[-1] if self.parents else node
        site = None
        in_function = any(isinstance(p, ast.FunctionDef | ast.Lambda) for p in self.parents)
        if in_function and (how := kind(node, parent)):
            site = Site(self.file, node.lineno, node.col_offset, how)
            self.found.append(site)
        if isinstance(node, ast.stmt):
            return self.statement(node, site)
        self.note(site)
        return self.deeper(node, site)

    def note(self, site: Site | None) -> None:
        if site in self.marks:
            self.reached.append(site)

    def deeper(self, node: ast.AST, site: Site | None) -> Any:
        self.parents.append(node)
        node = self.generic_visit(node)
        self.parents.pop()
        return mutated(node) if site is not None and site == self.mutant else node

    def statement(self, node: ast.stmt, site: Site | None) -> Any:
        """The statement, behind a call for each marked site in it that is in no statement inside."""
        outer, self.reached = self.reached, []
        self.note(site)
        new = self.deeper(node, site)
        calls = [ast.parse(f"{REACHED}({str(mark)!r})").body[0] for mark in self.reached]
        self.reached = outer
        return [*(ast.copy_location(call, node) for call in calls), new] if calls else new


def sites(path: Path) -> list[Site]:
    """Every mutant of a file."""
    walk = Walk(path.relative_to(ROOT).as_posix())
    walk.visit(ast.parse(path.read_text()))
    return walk.found


def changed(
    source: bytes | str, file: str, mutant: Site | None = None, marks: Sequence[Site] = ()
) -> ast.Module:
    """The tree of a file, mutated or marked.

    Raises:
        ValueError: the mutant is not in the file.
    """
    walk = Walk(file, mutant, marks)
    tree: ast.Module = walk.visit(ast.parse(source))
    if mutant is not None and mutant not in walk.found:
        raise ValueError(f"no such mutant: {mutant}")
    return ast.fix_missing_locations(tree)


class Loader(importlib.machinery.SourceFileLoader):
    """Compiles a changed tree, and neither reads nor writes compiled files."""

    def __init__(self, name: str, path: str, mutant: Site | None, marks: Sequence[Site]) -> None:
        super().__init__(name, path)
        self.mutant = mutant
        self.marks = marks

    def get_code(self, fullname: str) -> types.CodeType:
        source = Path(self.path).read_bytes()
        file = Path(self.path).relative_to(ROOT).as_posix()
        return compile(changed(source, file, self.mutant, self.marks), self.path, "exec", dont_inherit=True)


class Finder(importlib.abc.MetaPathFinder):
    """Gives `Loader` to the files that have a mutant or marks."""

    def __init__(self, mutant: Site | None, marks: Sequence[Site]) -> None:
        self.mutant = mutant
        self.marks = marks

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name.partition(".")[0] != "inductor_fusions":
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path or [str(ROOT)], target)
        if spec is None or spec.origin is None or not Path(spec.origin).is_relative_to(ROOT):
            return spec
        file = Path(spec.origin).relative_to(ROOT).as_posix()
        marks = [site for site in self.marks if site.file == file]
        mutant = self.mutant if self.mutant and self.mutant.file == file else None
        if marks or mutant:
            spec.loader = Loader(name, spec.origin, mutant, marks)
        return spec


class Plugin:
    """Runs the tests that were asked for, and adds the sites that each has reached to its report."""

    def __init__(self, wanted: dict[str, Any]) -> None:
        self.order = {nodeid: i for i, nodeid in enumerate(wanted.get("tests", ()))}
        self.within = tuple(wanted.get("within", ()))
        self.reached: set[str] = set()
        setattr(builtins, REACHED, self.reached.add)

    @pytest.hookimpl(wrapper=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> Generator[None, Any, Any]:
        result = yield  # a part of the tests is chosen from all of them
        items[:] = [
            item
            for item in items
            if (not self.order or item.nodeid in self.order)
            and (not self.within or item.nodeid.startswith(self.within))
        ]
        items.sort(key=lambda item: self.order.get(item.nodeid, 0))
        return result

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self) -> Generator[None, Any, Any]:
        self.reached.clear()
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
        report = yield
        if call.when == "teardown":
            report.user_properties.append(("reached", sorted(self.reached)))
        return report


def pytest_configure(config: pytest.Config) -> None:
    wanted = json.loads(Path(os.environ["MUTATING"]).read_text())
    mutant = Site.parse(wanted["mutant"]) if wanted.get("mutant") else None
    sys.meta_path.insert(0, Finder(mutant, [Site.parse(text) for text in wanted.get("sites", ())]))
    config.pluginmanager.register(Plugin(wanted), "mutating")
