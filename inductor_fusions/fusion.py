"""The contract of a fusion: `Fusion`, `Candidate`, `Rejected`, `LeftToStock`.

A `Fusion` has a stage, which says what graph it reads, and patterns for torch's pattern matcher. A pattern is
declared in one of three ways: an anchor, whose reader makes a `Candidate` of one match; a group, whose reader
makes candidates of all matches in a graph; or a replacement of one function by another. Each candidate proves
that it may be fused (`guard`) and changes the graph (`rewrite`). `matching` finds the candidates and
`passes.FusionPass` drives them, so a fusion contains no error handling, no reporting and no toggles.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from torch import fx

from ._inductor import Match, was_erased
from .reasons import LeftToStock as LeftToStock
from .reasons import Rejected as Rejected

Stage = Literal["pre_grad", "post_grad"]


class Unfinished(RuntimeError):
    """A graph has an unfinished change and must not be compiled: the compile is repeated without the site."""


class Candidate(ABC):
    """One place in a graph where a fusion may apply."""

    #: The node whose source line names the site in reports.
    anchor: fx.Node
    #: Whether the report lists it. A candidate that changes no kernel is listed only if it fails, or if sites
    #: are counted (INDUCTOR_FUSIONS_MAX).
    reported = True
    #: Whether it completes the rewrites of other candidates in the graph: it is not listed or counted, and an
    #: exception of it undoes them. Its guard rejects it if there are none.
    finishes = False

    @abstractmethod
    def guard(self) -> None:
        """Return if the site may and should be fused. It must not change the graph.

        Raises:
            Rejected: it is not proved to be correct.
            LeftToStock: it is correct, but not expected to be faster.
        """

    @abstractmethod
    def rewrite(self) -> str:
        """Fuse the site and return the name of the kernel.

        Add new nodes first and replace the old ones in the last step, so that an exception before it leaves a
        graph that still computes the same.
        """

    def describe(self) -> dict[str, str]:
        """Shapes and dtypes for reports: name -> text."""
        return {}

    def savings(self) -> dict[str, int]:
        """Estimated savings of one forward: "bytes" of memory traffic, and "flops".

        It is called after `guard` and before `rewrite`.
        """
        return {}


class Reported(Candidate):
    """A site that is never fused, and is listed in the report with its reason.

    Args:
        why: the reason; or what a reader raised at this node.
        details: as `describe` gives them.
    """

    def __init__(self, anchor: fx.Node, why: Exception, details: dict[str, str] | None = None) -> None:
        self.anchor, self.why, self.details = anchor, why, details or {}

    def describe(self) -> dict[str, str]:
        return self.details

    def guard(self) -> None:
        raise self.why

    def rewrite(self) -> str:
        raise AssertionError("it is never fused")


class Scope:
    """Facts of one graph, shared by the candidates of a fusion."""

    def __init__(self, graph: fx.Graph) -> None:
        self.graph = graph

    def bodies(self) -> Iterable[Scope]:
        """Scopes of the nested graphs, which are read after this one."""
        return ()

    def finish(self) -> Iterable[Candidate]:
        """Candidates that run after all others of the graph and its bodies (`Candidate.finishes`)."""
        return ()


#: Patterns of torch's matcher; or functions, operators and names of methods, which match any arguments.
Patterns: TypeAlias = Callable[[], Iterable[Any]]
Read: TypeAlias = "Candidate | Iterable[Candidate] | None"


def _check_patterns(patterns: Any) -> None:
    """Refuse patterns without a lambda around them, and a decorator without arguments."""
    try:
        inspect.signature(patterns).bind()
    except (TypeError, ValueError):
        raise TypeError(
            f"patterns must be a function without arguments that returns them, not {patterns!r}: "
            "@FUSION.anchor(lambda: [torch.relu])"
        ) from None


def nodes_of(matches: Sequence[Match]) -> list[fx.Node]:
    """The last node of each match, without nodes that were erased."""
    found = [match.output_node() for match in matches]
    return [node for node in found if not was_erased(node)]


@dataclass(frozen=True)
class Anchor:
    """Patterns, and a reader of each match.

    Attributes:
        patterns: returns the patterns; called when the first graph is read.
        read: returns the candidates around a match, or None.
        extra_check: whether to read a match, called before the graph is changed; None: read each.
    """

    patterns: Patterns
    read: Callable[[Any, Match], Read]
    extra_check: Callable[[Match], bool] | None = None


@dataclass(frozen=True)
class Group:
    """Patterns, and a reader of all their matches in a graph, in graph order.

    Attributes:
        patterns: returns the patterns; called when the first graph is read.
        read: yields the candidates. It is resumed after each rewrite, and may read its result.
        extra_check: as that of an anchor.
    """

    patterns: Patterns
    read: Callable[[Any, Sequence[Match]], Iterable[Candidate]]
    extra_check: Callable[[Match], bool] | None = None


@dataclass(frozen=True)
class Replacement:
    """One function to find, and one to replace it.

    Attributes:
        search, replace: functions of the same tensors.
        inputs: makes example tensors.
        check: raises `Rejected` if a match must not be replaced.
        near: patterns of near misses to report; None: made from the last operation of `search`.
    """

    search: Callable[..., Any]
    replace: Callable[..., Any]
    inputs: Callable[[], Sequence[Any]]
    check: Callable[[Match], None]
    near: Patterns | None


@dataclass(frozen=True, eq=False)
class Fusion:
    """A set of rewrites with one name, stage and toggle.

    Attributes:
        name: used by the toggle and in reports, such as "attention".
        stage: the graph that it reads: "pre_grad" or "post_grad".
        summary: one line: what is rewritten to what.
        before, after: names of fusions of the same stage that run later or earlier than this one. Unknown
            names are ignored.
        protects: whether it only avoids a wrong kernel. Tests that count fused sites do not count it, unless
            they name it.
        marks: operations that rewrites of an earlier stage put around a value. They are removed before the
            fusion reads the graph.
        exact: whether its results equal eager's bit for bit. Other fusions, except those that protect, are
            off if `torch._inductor.config.numerics` (torch 2.15) asks for eager's bits.
        scope: makes the `Scope` of a graph; returns None if the graph is not to be read.
        patterns: the declared anchors, groups and replacements, in order.
    """

    name: str
    stage: Stage
    summary: str
    before: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    protects: bool = False
    marks: tuple[Any, ...] = ()
    exact: bool = False
    scope: Callable[[fx.Graph], Scope | None] = Scope
    patterns: list[Anchor | Group | Replacement] = field(default_factory=list, repr=False)

    def anchor(
        self, patterns: Patterns, extra_check: Callable[[Match], bool] | None = None
    ) -> Callable[[Callable[[Any, Match], Read]], Any]:
        """Decorate a reader that maps `(scope, match)` to a candidate, several candidates, or None.

        Matches are read in graph order, each after those before it were fused or rejected.

        Args:
            patterns: returns the patterns; called when the first graph is read, because importing the matcher
                takes seconds.
            extra_check: whether to read a match, called before the graph is changed.

        Raises:
            TypeError: `patterns` is no function without arguments.
        """
        return self._declared(Anchor, patterns, extra_check)

    def group(
        self, patterns: Patterns, extra_check: Callable[[Match], bool] | None = None
    ) -> Callable[[Callable[[Any, Sequence[Match]], Any]], Any]:
        """Decorate a reader that maps `(scope, matches)`, all matches of a graph, to candidates.

        Args:
            patterns: as those of `anchor`.
            extra_check: as that of `anchor`.

        Raises:
            TypeError: `patterns` is no function without arguments.
        """
        return self._declared(Group, patterns, extra_check)

    def _declared(
        self, kind: type[Anchor | Group], patterns: Patterns, extra_check: Callable[[Match], bool] | None
    ) -> Callable[[Callable[[Any, Any], Any]], Any]:
        _check_patterns(patterns)

        def declare(read: Callable[[Any, Any], Any]) -> Any:
            self.patterns.append(kind(patterns, read, extra_check))
            return read

        return declare

    def replacement(
        self,
        search: Callable[..., Any],
        replace: Callable[..., Any],
        *,
        inputs: Callable[[], Sequence[Any]],
        check: Callable[[Match], None],
        near: Patterns | None = None,
    ) -> None:
        """Replace what `search` computes by `replace`, in the graphs after autograd.

        Both are traced to aten operations, as Inductor's own patterns are, with the shapes and constants of
        the match.

        Args:
            search: a function of tensors: the form to find.
            replace: a function of the same tensors, with the same names: the replacement.
            inputs: makes example tensors; called under fake tensors at the first graph.
            check: takes the match and raises `Rejected` if it must not be replaced, for example because of
                dtypes, devices or sizes. `match.kwargs` has the arguments by name.
            near: patterns of near misses to report, with what was expected. By default, graphs with the last
                operation of `search` and at least half of the others.

        Raises:
            ValueError: the stage is not "post_grad": graphs before autograd have no aten operations.
        """
        if self.stage != "post_grad":
            raise ValueError(f"{self.name}: a replacement by functions needs stage='post_grad'")
        self.patterns.append(Replacement(search, replace, inputs, check, near))

    def functions(self) -> list[Callable[..., Any]]:
        """The functions of the fusion, whose source files are part of cache keys."""
        found: list[Any] = []
        for each in self.patterns:
            if isinstance(each, Replacement):
                found += [each.search, each.replace, each.check, each.inputs]
            else:
                found += [each.read, each.patterns, *([each.extra_check] if each.extra_check else [])]
        return found
