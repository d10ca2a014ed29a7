"""torch's pattern matcher: the patterns of one fusion, what they match in a graph, and its counters.

`PatternMatcherPass.apply` goes backwards through a graph and asks the `extra_check` of each match. Here that
files the match and says no: what a site may become is settled later, in graph order, since what one site
becomes the next one reads. So torch counts nothing by itself, and `count_match` does it for what is fused.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from .versions import torch_version

if TYPE_CHECKING:
    from torch._inductor.pattern_matcher import Match, PatternExpr


@functools.cache
def _torch() -> Any:
    """The module, which takes seconds to import."""
    return importlib.import_module("torch._inductor.pattern_matcher")


@dataclass(eq=False)
class Found:
    """One match of a pattern.

    Attributes:
        key: what the pattern was added with.
        match: the match, as it was when the graph was searched.
        check: of a replacement, torch's own: whether the search function means the same with these shapes and
            constants, and what it is replaced by. It may raise what the check of the fusion raises.
    """

    key: int
    entry: Any
    match: Match
    check: Callable[[Match], bool] | None = None

    @property
    def node(self) -> fx.Node:
        """The last node that is matched."""
        return self.match.output_node()

    def current(self) -> Match | None:
        """The match as the graph is now; None where it has none any more."""
        node = self.node
        if node._erased:
            return None
        if is_one_node(self.entry.pattern):
            self.match.args, self.match.kwargs = list(node.args), dict(node.kwargs)
            return self.match
        match = self.entry.pattern.match(node)
        if not _torch().is_match(match) or _crosses(match.nodes):
            return None
        self.match = match
        return self.match

    def replace(self) -> bool:
        """Put what a replacement was traced to in the place of the match, whose check has passed.

        Returns:
            Whether other nodes have got other places.
        """
        graph, roots = self.node.graph, self.match.output_nodes()
        source, known = self.node.meta, set(graph.nodes)
        self.entry.apply(self.match, graph, self.node)
        for node in graph.nodes:
            if node not in known and "stack_trace" in source:
                node.meta.setdefault("stack_trace", source["stack_trace"])
        if len(roots) == 1:
            return False
        _torch().stable_topological_sort(graph)  # it stands in front of the first output
        return True


def is_one_node(pattern: PatternExpr) -> bool:
    """Whether a pattern is an operation with whatever arguments."""
    matcher = _torch()
    return isinstance(pattern, (matcher.CallFunctionVarArgs, matcher.CallMethodVarArgs))


def _crosses(nodes: Sequence[fx.Node]) -> bool:
    """Whether something is written to between the nodes of a match, or they are in several streams."""
    if len({node.meta.get("custom", {}).get("stream", 0) for node in nodes}) > 1:
        return True
    node, last = min(nodes), max(nodes)
    while node is not last:
        node = node.next
        if _torch().is_mutation_op(node):
            return True
    return False


class Patterns:
    """The patterns of one fusion: a `PatternMatcherPass`."""

    def __init__(self, name: str) -> None:
        self.matcher = _torch().PatternMatcherPass(pass_name=name, subsystem="inductor_fusions")

    def add(self, key: int, patterns: Iterable[Any], check: Callable[[Match], bool] | None = None) -> None:
        """Add patterns to search for.

        Args:
            patterns: patterns of torch; functions and operators, and names of methods, which match with
                whatever arguments and users.
            check: which matches are filed; None: all.
        """
        torch_matcher, functions, methods = _torch(), dict[Any, None](), dict[str, None]()
        found: list[Any] = []
        for each in patterns:
            if isinstance(each, torch_matcher.PatternExpr):
                found.append(each)
            elif isinstance(each, str):
                methods[each] = None
            elif isinstance(each, torch._ops.OpOverloadPacket):
                functions.update(dict.fromkeys([each, *(getattr(each, name) for name in each.overloads())]))
            else:
                functions[each] = None
        if functions:
            found.append(torch_matcher.CallFunctionVarArgs(list(functions), users=torch_matcher.MULTIPLE))
        if methods:
            found.append(torch_matcher.CallMethodVarArgs(list(methods), users=torch_matcher.MULTIPLE))
        for pattern in found:
            entry = torch_matcher.GraphPatternEntry(pattern=pattern, extra_check=_refuse, handler=_refuse)
            entry.extra_check = functools.partial(_file, key, entry, check, None)
            entry.register(self.matcher)

    def add_replacement(
        self,
        key: int,
        search: Callable[..., Any],
        replace: Callable[..., Any],
        inputs: Callable[[], Sequence[Any]],
        check: Callable[[Match], bool],
    ) -> PatternExpr:
        """Look for what a function is traced to; returns the pattern.

        Args:
            key: what matches are found by.
            search, replace: functions of the same tensors.
            inputs: makes examples of them; called under fake tensors.
        """
        known = [entry for entries in self.matcher.patterns.values() for entry in entries]
        with _tracing():
            _torch().register_replacement(
                search, replace, list(inputs()), _as_post_grad, self.matcher, extra_check=check
            )
        added = {
            id(entry): entry
            for entries in self.matcher.patterns.values()
            for entry in entries
            if not any(entry is each for each in known)
        }
        (entry,) = added.values()
        entry.extra_check = functools.partial(_file, key, entry, None, entry.extra_check)
        pattern: PatternExpr = entry.pattern
        return pattern

    def search(self, graph: fx.Graph) -> list[Found]:
        """Every match in a graph, in its order."""
        owner: Any = graph.owning_module
        if not isinstance(owner, fx.GraphModule):
            owner = fx.GraphModule(torch.nn.Module(), fx.Graph())
            owner._graph = graph
        nodes = {key: graph.find_nodes(op=key[0], target=key[1], sort=False) for key in self.matcher.patterns}
        search = _Search()
        token = _search.set(search)
        try:
            entries = [entry for key, found in nodes.items() if found for entry in self.matcher.patterns[key]]
            # torch visits every node for it, and looks for writes in between.
            if os.environ.get(_SHOW) or not all(is_one_node(entry.pattern) for entry in entries):
                self._apply(owner)
            self._read_single(nodes, search)
        finally:
            _search.reset(token)
        return sorted(search.found, key=lambda each: each.node)

    def _apply(self, owner: fx.GraphModule) -> None:
        """File the matches that torch finds."""
        from torch._subclasses.fake_tensor import unset_fake_temporarily

        was_known = _REGION in next(iter(owner.graph.nodes)).meta
        try:
            with unset_fake_temporarily():  # it asks each node for its device, which is faster without
                self.matcher.apply(owner)
        finally:
            if not was_known:
                for node in owner.graph.nodes:
                    node.meta.pop(_REGION, None)

    def _read_single(self, nodes: dict[tuple[str, Any], list[fx.Node]], search: _Search) -> None:
        """File the nodes that a pattern of one node matches, unless torch has found them.

        torch passes over some for their dtype or device: they are reported, too.
        """
        for key, found in nodes.items():
            for entry in self.matcher.patterns[key] if found else ():
                if is_one_node(entry.pattern):
                    for node in found:
                        if (id(entry), node) not in search.seen:
                            entry.extra_check(entry.pattern.match(node))


#: The variable that shows what torch matches.
_SHOW = "TORCHINDUCTOR_PATTERN_MATCH_DEBUG"
#: Where torch notes between which writes a node stands; not kept, since graphs change.
_REGION = "mutation_region_id"


@dataclass
class _Search:
    """The matches in one graph; not in the entries, which outlive it and are shared by threads."""

    found: list[Found] = field(default_factory=list)
    seen: set[tuple[int, fx.Node]] = field(default_factory=set)


_search: ContextVar[_Search | None] = ContextVar("inductor_fusions_search", default=None)


def _file(
    key: int,
    entry: Any,
    wanted: Callable[[Match], bool] | None,
    check: Callable[[Match], bool] | None,
    match: Match,
) -> bool:
    """The `extra_check` of every entry."""
    search = _search.get()
    if search is not None:
        search.seen.add((id(entry), match.output_node()))
        if wanted is None or wanted(match):
            search.found.append(Found(key, entry, match, check))
    return False


def _refuse(*args: Any, **kwargs: Any) -> bool:
    return False


# -- traces ---------------------------------------------------------------------------------------


@contextlib.contextmanager
def _tracing() -> Iterator[None]:
    """Trace as Inductor traces its own patterns: with fake tensors, outside of the compile, uncounted."""
    from torch._dynamo.utils import counters
    from torch._guards import tracing
    from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily

    counted = counters[_torch().backend].copy()
    try:
        with tracing(None), unset_fake_temporarily(), FakeTensorMode():
            yield
    finally:
        counters[_torch().backend] = counted


def _as_post_grad(function: Callable[..., Any], args: Sequence[Any], **options: Any) -> fx.GraphModule:
    """Trace a function to the form that it has after Inductor's passes over the joint graph."""
    from torch._dynamo.utils import counters

    module: fx.GraphModule = _torch().fwd_only(function, args, **options)
    counted = counters[_torch().backend].copy()
    importlib.import_module("torch._inductor.fx_passes.joint_graph").early_patterns.apply(module.graph)
    counters[_torch().backend] = counted
    for node in module.graph.find_nodes(op="call_function", target=torch.ops.aten.view.default):
        node.target = torch.ops.aten.reshape.default
    module.graph.eliminate_dead_code()
    module.recompile()
    return module


# -- differences ----------------------------------------------------------------------------------


def undeclared(match: Match) -> str:
    """A keyword argument that a pattern does not name, or "": torch 2.15 refuses a match that has one."""
    for pattern, node in match.ctx.pattern_to_node.items():
        if isinstance(pattern, _torch()._TargetArgsExpr) and isinstance(node, fx.Node):
            for name, given in node.kwargs.items():
                if name not in pattern.kwargs and not _is_default(node, name, given):
                    return f"at {node.name}: the pattern has no {name}={given}"
    return ""


def _is_default(node: fx.Node, name: str, given: Any) -> bool:
    schema = getattr(node.target, "_schema", None)
    for argument in schema.arguments if schema is not None else ():
        if argument.name == name:
            return bool(argument.has_default_value() and argument.default_value == given)
    return False


def difference(pattern: Any, node: Any) -> tuple[str, int]:
    """The first difference between a graph and a pattern, or "", and how many operations agree before it."""
    agreed = [0]
    if isinstance(pattern, _torch().MultiOutputPattern):
        pattern = pattern.outputs[0]
    return _differs(pattern, node, agreed, True, {}), agreed[0]


def _differs(pattern: Any, node: Any, agreed: list[int], last: bool, bound: dict[str, Any]) -> str:
    matcher = _torch()
    if isinstance(pattern, matcher.KeywordArg):
        if bound.setdefault(pattern.name, node) is not node and isinstance(node, fx.Node):
            return f"the pattern expects {node.name} and {bound[pattern.name]} to be the same tensor"
        return ""
    if not isinstance(pattern, matcher._TargetArgsExpr):
        if isinstance(pattern, matcher.PatternExpr) or isinstance(node, fx.Node) or pattern == node:
            return ""
        return f"expected {pattern}, got {node}"
    wanted = pattern.fns_repr()
    if not isinstance(node, fx.Node):
        return f"expected {wanted}, got {node}"
    if node.op != pattern.op or node.target not in pattern.fns_set:
        return f"at {node.name}: expected {wanted}"
    agreed[0] += 1
    for name, given in node.kwargs.items():
        if name not in pattern.kwargs and not _is_default(node, name, given):
            return f"at {node.name}: the pattern has no {name}={given}"
    if len(node.args) != len(pattern.args):
        return f"at {node.name}: expected {wanted} with {len(pattern.args)} arguments"
    for inner, argument in zip(pattern.args, node.args, strict=True):
        for part, given in zip(*_flat(inner, argument), strict=False):
            found = _differs(part, given, agreed, False, bound)
            if found:
                return found if found.startswith("at ") else f"at {node.name}: {found}"
    if not last and pattern.users is not matcher.MULTIPLE and len(node.users) != pattern.users:
        users = ", ".join(user.name for user in node.users)
        return f"at {node.name}: expected {pattern.users} user(s), got {len(node.users)}: {users}"
    return ""


def _flat(pattern: Any, argument: Any) -> tuple[Sequence[Any], Sequence[Any]]:
    if isinstance(pattern, (list, tuple)) and isinstance(argument, (list, tuple)):
        return pattern, argument
    return [pattern], [argument]


def pattern_size(pattern: Any) -> int:
    """How many operations a pattern has, those that it reads twice counted twice."""
    matcher = _torch()
    if isinstance(pattern, matcher.MultiOutputPattern):
        return pattern_size(pattern.outputs[0])
    if not isinstance(pattern, matcher._TargetArgsExpr):
        return 0
    return 1 + sum(pattern_size(each) for each in pattern.flat_args_kwargs[0])


def roots(pattern: Any) -> PatternExpr:
    """The last operation of a pattern, with whatever arguments."""
    matcher = _torch()
    if isinstance(pattern, matcher.MultiOutputPattern):
        pattern = pattern.outputs[0]
    found: PatternExpr = matcher.CallFunctionVarArgs(pattern.fns, users=matcher.MULTIPLE)
    return found


# -- counters -------------------------------------------------------------------------------------


def count_match(name: str, nodes: int) -> None:
    """Count a fused site as torch counts a pattern that it has replaced.

    Args:
        nodes: how many nodes were replaced.
    """
    from torch._dynamo.utils import counters

    backend = _torch().backend
    counters[backend]["pattern_matcher_count"] += 1
    counters[backend]["pattern_matcher_nodes"] += nodes
    if torch_version() >= (2, 12) and os.environ.get(_SHOW):
        counters[f"{backend}_pattern_matcher_per_pattern"][name] += 1
