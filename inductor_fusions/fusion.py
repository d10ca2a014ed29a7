"""What a fusion is.

A `Fusion` says where it looks (`stage`) and how to find candidates; each `Candidate` proves that it
may be fused (`guard`) and does it (`rewrite`). `passes.FusionPass` drives them, so that a fusion
contains no error handling, no reporting and no toggles of its own.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

from torch import fx

Stage = Literal["pre_grad", "post_grad"]


class Rejected(Exception):
    """The site does not mean what the fused kernel computes, or this could not be proved.

    Args:
        reason: the first predicate that failed, in words.
        hint: what the user could change, or "".
    """

    def __init__(self, reason: str, hint: str = "") -> None:
        super().__init__(reason)
        self.reason, self.hint = reason, hint


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


@dataclass(frozen=True)
class Fusion:
    """A rewrite that `torch.compile` gains.

    Attributes:
        name: what the toggle and the reports call it, such as "attention".
        stage: which graph it reads.
        summary: one line on what it turns into what.
        recognise: yields the candidates of one graph, in graph order. The graph stays as it is.
        before, after: names of fusions of the same stage that run later or earlier than this one. Names that
            do not exist are ignored.
        protects: whether it only keeps a graph from a kernel that is wrong: tests that count what is fused do
            not count it, unless they name it.
        marks: operations that rewrites of an earlier stage put around a value, and that stand for their
            operand in this stage: they are taken out before the fusion reads the graph.
        exact: whether what it makes has the bits of what it replaces. Others, but for those that protect, do
            nothing where the bits of eager are asked for (`torch._inductor.config.numerics`, torch 2.15).
    """

    name: str
    stage: Stage
    summary: str
    recognise: Callable[[fx.Graph], Iterable[Candidate]]
    before: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    protects: bool = False
    marks: tuple[Any, ...] = ()
    exact: bool = False
