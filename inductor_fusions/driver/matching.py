"""Finds the candidates of a fusion: matches of its patterns, in graph order.

Each fusion has a `PatternMatcherPass` of its own. It is applied once to a graph, and only notes every match.
Then the matches are read one after another, each in the graph that the sites before it have left. The
counters that torch has for its own patterns are increased for each fused site.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import fx

from .. import _inductor
from ..fusion import Anchor, Candidate, Fusion, Group, Replacement, Reported, Scope
from ..graph.facts import forget
from ..operands import text
from ..reasons import Reason


def candidates(fusion: Fusion, graph: fx.Graph) -> Iterator[Candidate]:
    """Every candidate of a fusion in a graph, and in the bodies that its scope names.

    Args:
        graph: changed in between by those who take a candidate.
    """
    scope = fusion.scope(graph) if fusion.patterns else None
    if scope is not None:
        yield from _Matcher.of(fusion).candidates(scope)


class _Matcher:
    """The patterns of a fusion, built when its first graph is read."""

    def __init__(self, fusion: Fusion) -> None:
        self.fusion = fusion
        self.patterns = _inductor.Patterns(fusion.name)
        #: The pattern of each replacement; the patterns of its near misses have numbers from `near` on.
        self.searched: dict[int, Any] = {}
        self.near = len(fusion.patterns)
        for key, declared in enumerate(fusion.patterns):
            if isinstance(declared, Replacement):
                self._add(key, declared)
            else:
                self.patterns.add(key, declared.patterns(), declared.extra_check)

    @staticmethod
    @functools.cache
    def of(fusion: Fusion) -> _Matcher:
        """The matcher of a fusion, made once."""
        return _Matcher(fusion)

    def _add(self, key: int, declared: Replacement) -> None:
        def check(match: Any) -> bool:
            declared.check(match)
            return True

        pattern = self.patterns.add_replacement(
            key, declared.search, declared.replace, declared.inputs, check
        )
        self.searched[key] = pattern
        near = [_inductor.roots(pattern)] if declared.near is None else declared.near()
        self.patterns.add(self.near, near)

    def candidates(self, scope: Scope) -> Iterator[Candidate]:
        """The candidates of a graph, then those of its bodies."""
        found: dict[int, list[_inductor.Found]] = {}
        for each in self.patterns.search(scope.graph):
            found.setdefault(each.key, []).append(each)
        for key, declared in enumerate(self.fusion.patterns):
            matches = found.get(key, [])
            if isinstance(declared, Anchor):
                yield from _around(declared, scope, matches)
            elif isinstance(declared, Group):
                every = [each.match for each in matches]
                yield from _read(declared, scope, every, matches[0].node if matches else None)
            else:
                for each in matches:
                    if each.current() is not None:
                        yield Replaced(each, declared.replace.__name__)
        yield from self._near(found)
        for body in scope.bodies():
            yield from self.candidates(body)
        yield from scope.finish()

    def _near(self, found: dict[int, list[_inductor.Found]]) -> Iterator[Candidate]:
        """Near misses of replacements, to be reported."""
        matched = {each.node for key in self.searched for each in found.get(key, ())}
        asked = any(isinstance(d, Replacement) and d.near is not None for d in self.fusion.patterns)
        for each in found.get(self.near, ()):
            if each.node in matched or each.current() is None:
                continue
            matched.add(each.node)
            told = [(_inductor.difference(p, each.node), p) for p in self.searched.values()]
            (problem, agreed), pattern = max(told, key=lambda one: one[0][1])
            if problem and (asked or agreed >= max(2, _inductor.pattern_size(pattern) // 2)):
                yield Reported(each.node, Reason.NEAR_MISS.rejected(problem))


def _around(declared: Anchor, scope: Scope, found: Iterable[_inductor.Found]) -> Iterator[Candidate]:
    for each in found:
        match = each.current()
        if match is None or _inductor.undeclared(match):
            continue
        yield from _read(declared, scope, match, each.node)


def _read(declared: Anchor | Group, scope: Scope, found: Any, node: fx.Node | None) -> Iterator[Candidate]:
    """What a reader makes of its matches; if it raises, a site at `node` that says so."""
    try:
        read = declared.read(scope, found)
        yield from [read] if isinstance(read, Candidate) else read or ()
    except Exception as error:
        if node is None:
            raise
        yield Reported(node, error)


class Replaced(Candidate):
    """A match of a search function.

    Args:
        kernel: what the report calls the replacement.
    """

    def __init__(self, found: _inductor.Found, kernel: str) -> None:
        self.found, self.kernel, self.anchor = found, kernel, found.node

    def describe(self) -> dict[str, str]:
        given = self.found.match.kwargs.items()
        values = {name: node.meta.get("val") for name, node in given if isinstance(node, fx.Node)}
        return {name: text(value) for name, value in values.items() if isinstance(value, torch.Tensor)}

    def guard(self) -> None:
        match = self.found.match
        problem = _inductor.undeclared(match)
        if problem:
            raise Reason.NEAR_MISS.rejected(problem)
        check = self.found.check
        assert check is not None
        with _inductor.suppress_guards(_inductor.fake_mode_of(self.anchor.graph)):
            if not check(match):
                raise Reason.NEAR_MISS.rejected(
                    f"at {self.anchor.name}: for these shapes, dtypes and constants the search function "
                    "traces to another graph"
                )
        self._check_results()

    def _check_results(self) -> None:
        """Refuse a replacement whose results differ from the matched ones in shape, dtype or device."""
        traced = self.found.match.replacement_graph
        assert traced is not None
        (last,) = traced.graph.find_nodes(op="output")
        results = last.args[0] if isinstance(last.args[0], (list, tuple)) else [last.args[0]]
        for old, new in zip(self.found.match.output_nodes(), results, strict=True):
            if old is None:
                continue
            if _kind(old) != _kind(new):
                raise Reason.NEAR_MISS.rejected(
                    f"at {old.name}: the replacement returns {_kind(new)} instead of {_kind(old)}"
                )
            if any(user.target is torch.ops.aten.as_strided.default for user in old.users):
                raise Reason.NEAR_MISS.rejected(
                    f"as_strided reads {old.name}, and its replacement may have other strides"
                )

    def rewrite(self) -> str:
        if self.found.replace():
            forget(self.anchor.graph)
        return self.kernel


def _kind(node: Any) -> str:
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    if not isinstance(value, torch.Tensor):
        return str(value)
    return f"{text(value)} on {value.device}"
