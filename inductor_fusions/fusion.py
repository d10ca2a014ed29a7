"""The contract of a fusion: `Fusion`, `Candidate`, `Rejected`, `LeftToStock`.

A `Fusion` says where it looks (`stage`) and for what: patterns of torch's pattern matcher. What a pattern
matches is an anchor, around which a reader finds a `Candidate`; or all matches of a graph are a group, in
which it finds several; or two functions say what is replaced by what. Each candidate proves that it may be
fused (`guard`) and does it (`rewrite`). `matching` finds the candidates and `passes.FusionPass` drives them,
so that a fusion contains no error handling, no reporting and no toggles of its own.
"""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from torch import fx

from ._inductor import was_erased
from .reasons import code_of

if TYPE_CHECKING:
    from ._inductor import Match

Stage = Literal["pre_grad", "post_grad"]


class Rejected(Exception):
    """The site does not mean what the fused kernel computes, or this could not be proved.

    Args:
        reason: the first predicate that failed, in words; one that a member of `reasons.Reason` has made has
            a code.
        hint: what the user could change, or "".
    """

    def __init__(self, reason: str, hint: str = "") -> None:
        super().__init__(reason)
        self.reason, self.hint = reason, hint

    @property
    def code(self) -> str:
        """The code of the reason."""
        return code_of(self.reason)


class LeftToStock(Rejected):
    """The site could be fused, and is better off as it is."""


class Unfinished(RuntimeError):
    """Half of a change is in a graph, which must not be compiled: the compile is made again without it."""


class Candidate(ABC):
    """One place in a graph where a fusion may apply."""

    #: The node whose source line names the site in reports.
    anchor: fx.Node
    #: Whether it is a site of the report. What changes nothing that a kernel does is one only where it fails,
    #: and where sites are counted (INDUCTOR_FUSIONS_MAX).
    reported = True
    #: Whether it finishes what others have begun in the graph: it is no site and not counted, and what it
    #: raises undoes them. Its guard rejects where there are none.
    finishes = False

    @abstractmethod
    def guard(self) -> None:
        """Return if the site may and should be fused. The graph stays as it is.

        Raises:
            Rejected: it may not.
            LeftToStock: it may, and does not pay.
        """

    @abstractmethod
    def rewrite(self) -> str:
        """Fuse the site and return the name of the kernel that it becomes.

        New nodes come first and are put to use by the last step, so that an exception on the way
        leaves a graph that still computes what it did.
        """

    def describe(self) -> dict[str, str]:
        """Shapes and dtypes for reports: name -> text."""
        return {}

    def savings(self) -> dict[str, int]:
        """What the fused site need not do, estimated for one forward: "bytes" of memory traffic, "flops".

        Asked after `guard`, before `rewrite`.
        """
        return {}


class Reported(Candidate):
    """What is never fused, and stands in the report with its reason.

    Args:
        anchor: the node.
        why: the reason.
        details: as `describe` gives them.
    """

    def __init__(self, anchor: fx.Node, why: Rejected, details: dict[str, str] | None = None) -> None:
        self.anchor, self.why, self.details = anchor, why, details or {}

    def describe(self) -> dict[str, str]:
        return self.details

    def guard(self) -> None:
        raise self.why

    def rewrite(self) -> str:
        raise AssertionError("it is never fused")


class Scope:
    """What a fusion knows of one graph while its candidates are tried.

    Args:
        graph: the graph.
    """

    def __init__(self, graph: fx.Graph) -> None:
        self.graph = graph

    def bodies(self) -> Iterable[Scope]:
        """The graphs that this one runs, to be read after it."""
        return ()

    def finish(self) -> Iterable[Candidate]:
        """What is done when the graph and its bodies have no other candidate left (`Candidate.finishes`)."""
        return ()


#: Patterns of torch's matcher; or functions, operators and names of methods, with whatever arguments.
Patterns: TypeAlias = Callable[[], Iterable[Any]]
Read: TypeAlias = "Candidate | Iterable[Candidate] | None"


def nodes_of(matches: Sequence[Match]) -> list[fx.Node]:
    """The last node of each match, of those that are still in the graph."""
    found = [match.output_node() for match in matches]
    return [node for node in found if not was_erased(node)]


@dataclass(frozen=True)
class Anchor:
    """Patterns, and what reads a match of one.

    Attributes:
        patterns: called when the first graph is read.
        read: the candidates around a match, or None.
        extra_check: whether a match is one to read, asked before anything is changed; None: each.
    """

    patterns: Patterns
    read: Callable[[Any, Match], Read]
    extra_check: Callable[[Match], bool] | None = None


@dataclass(frozen=True)
class Group:
    """Patterns, and what reads all of their matches in a graph, in its order.

    Attributes:
        patterns: called when the first graph is read.
        read: yields the candidates. What it yields next may be read from what the last one became.
        extra_check: as that of an anchor.
    """

    patterns: Patterns
    read: Callable[[Any, Sequence[Match]], Iterable[Candidate]]
    extra_check: Callable[[Match], bool] | None = None


@dataclass(frozen=True)
class Replacement:
    """What one function computes, by another one.

    Attributes:
        search, replace: functions of the same tensors.
        inputs: makes examples of them.
        check: raises `Rejected` where a match may not be replaced.
        near: patterns of what is reported where it is nearly a match; None: what ends alike.
    """

    search: Callable[..., Any]
    replace: Callable[..., Any]
    inputs: Callable[[], Sequence[Any]]
    check: Callable[[Match], None]
    near: Patterns | None


@dataclass(frozen=True, eq=False)
class Fusion:
    """A rewrite that `torch.compile` gains.

    Attributes:
        name: what the toggle and the reports call it, such as "attention".
        stage: which graph it reads.
        summary: one line on what it turns into what.
        recognise: yields the candidates of one graph, in graph order; the graph stays as it is. Deprecated:
            the loop over the graph is the matcher's, by `anchor`, `group` and `replacement`.
        before, after: names of fusions of the same stage that run later or earlier than this one. Names that
            do not exist are ignored.
        protects: whether it only keeps a graph from a kernel that is wrong: tests that count what is fused do
            not count it, unless they name it.
        marks: operations that rewrites of an earlier stage put around a value, and that stand for their
            operand in this stage: they are taken out before the fusion reads the graph.
        exact: whether what it makes has the bits of what it replaces. Others, but for those that protect, do
            nothing where the bits of eager are asked for (`torch._inductor.config.numerics`, torch 2.15).
        scope: makes what readers know of a graph; None where it is not to be read.
        patterns: what was declared, in order.
    """

    name: str
    stage: Stage
    summary: str
    recognise: Callable[[fx.Graph], Iterable[Candidate]] | None = None
    before: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    protects: bool = False
    marks: tuple[Any, ...] = ()
    exact: bool = False
    scope: Callable[[fx.Graph], Scope | None] = Scope
    patterns: list[Anchor | Group | Replacement] = field(default_factory=list, repr=False)

    def __post_init__(self) -> None:
        if self.recognise is not None:
            warnings.warn(
                f"{self.name}: `recognise` will be removed in the next release; use `anchor`, `group` or "
                "`replacement`",
                DeprecationWarning,
                stacklevel=3,  # whoever makes the fusion
            )

    def anchor(
        self, patterns: Patterns, extra_check: Callable[[Match], bool] | None = None
    ) -> Callable[[Callable[[Any, Match], Read]], Any]:
        """Decorate a reader: `(scope, match)` to a candidate, several of them, or None.

        Matches are read in graph order, each when those before it are fused or rejected.

        Args:
            patterns: called when the first graph is read, since importing the matcher takes seconds.
            extra_check: whether a match is one to read, asked before anything in the graph is changed.
        """

        def declare(read: Callable[[Any, Match], Read]) -> Any:
            self.patterns.append(Anchor(patterns, read, extra_check))
            return read

        return declare

    def group(
        self, patterns: Patterns, extra_check: Callable[[Match], bool] | None = None
    ) -> Callable[[Callable[[Any, Sequence[Match]], Any]], Any]:
        """Decorate a reader of all matches of a graph: `(scope, matches)` to candidates.

        Args:
            patterns: as those of `anchor`.
            extra_check: as that of `anchor`.
        """

        def declare(read: Callable[[Any, Sequence[Match]], Any]) -> Any:
            self.patterns.append(Group(patterns, read, extra_check))
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

        Both are traced, as Inductor's own patterns are: to operators of aten, with the shapes and constants
        of the match.

        Args:
            search: a function of tensors: what is looked for.
            replace: a function of the same tensors, with the same names: what is put in its place.
            inputs: makes examples of them, under fake tensors, at the first graph.
            check: takes the match and raises `Rejected` where it may not be replaced: dtypes, devices and
                sizes that were not thought of. `match.kwargs` has the arguments by name.
            near: patterns of what is reported where it is nearly a match, with what was expected; by default
                what has the last operation of `search`, and at least half of the others.

        Raises:
            ValueError: the fusion reads graphs before autograd, which are not in operators of aten.
        """
        if self.stage != "post_grad":
            raise ValueError(f"{self.name}: a replacement by functions needs stage='post_grad'")
        self.patterns.append(Replacement(search, replace, inputs, check, near))

    def functions(self) -> list[Callable[..., Any]]:
        """What the fusion is made of, for those who look for its source."""
        found: list[Any] = [self.recognise] if self.recognise is not None else []
        for each in self.patterns:
            if isinstance(each, Replacement):
                found += [each.search, each.replace, each.check, each.inputs]
            else:
                found += [each.read, each.patterns, *([each.extra_check] if each.extra_check else [])]
        return found
