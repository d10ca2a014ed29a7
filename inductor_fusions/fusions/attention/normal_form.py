"""The normal form that a softmax and its surroundings are parsed into.

    out = dropout(softmax(scale * q @ k^T + sum(biases), where fills do not hide)) @ v

with, in between, functions of a score (`Stage`: the softcap is one) and an attention sink.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from ...graph.torch_ops import source
from .arrangement import Arrangement
from .operands import Operand


@dataclass(frozen=True)
class Term:
    """Something between the product and the softmax that acts on the scores.

    Attributes:
        node: a tensor broadcastable to the scores of its stage, or one that is seen so: a bias, or the
            condition of a fill.
        lead: leading dims of the scores where it is applied.
        factor: what a bias is multiplied by.
        fill: None for a bias; for a fill the number that replaces the score.
        hides: whether a fill replaces scores where its condition is true.
        floor: the scores are clamped to this afterwards, which makes -inf finite.
        adds: for a fill whose number is added to the score, not put in its place: how many terms in front of
            it are parts of the tensor that it fills.
        depth: for a bias that is 0 where a key is seen and one number elsewhere: that number.
    """

    node: Any
    lead: tuple[Any, ...]
    factor: float = 1.0
    fill: float | None = None
    hides: bool = True
    floor: float | None = None
    adds: int = 0
    depth: float | None = None

    def as_scaler(self) -> tuple[str, Any, tuple[Any, ...]]:
        """A fill with 0 of whole rows, as `Attention.behind` has it."""
        return "hide" if self.hides else "show", self.node, self.lead


@dataclass(frozen=True)
class Below:
    """What is done to the scores that a node holds, from there down to the softmax.

    Attributes:
        at: what the dims of the scores are.
        factor: the numbers by which they are multiplied.
        scalers: the tensors: "mul" or "div", by what, leading sizes of the scores there.
    """

    at: Arrangement
    factor: float = 1.0
    scalers: tuple[tuple[str, Any, tuple[Any, ...]], ...] = ()

    def times(self, number: float) -> Below:
        """The normal form of scores that a number multiplies first."""
        return replace(self, factor=self.factor * number)

    def scaled(self, name: str, by: Term) -> Below:
        """The normal form of scores that a tensor multiplies ("mul") or divides ("div") first."""
        return replace(self, scalers=(*self.scalers, (name, by.node, by.lead)))


@dataclass(frozen=True)
class Stage:
    """A function of the scores on their way to the softmax: function(scale * scores + sum(terms)).

    Attributes:
        scale, scalers, terms: as in `Attention`, before the function.
        function: name in `SCORE_FUNCTIONS`, or "mul", "div" (by `operand`), "where" (`operand` is the
            condition under which `numbers[0]` replaces a score), "where_not".
        called: what the caller wrote, such as "masked_fill" for "where".
        numbers: arguments of the function after the score.
        operand: a tensor that varies over queries or keys.
    """

    scale: float
    scalers: list[tuple[str, fx.Node, tuple[Any, ...]]]
    terms: list[Term]
    function: str
    called: str
    numbers: tuple[float | None, ...] = ()
    operand: Term | None = None


#: Functions of one score, of which a kernel can be told.
SCORE_FUNCTIONS = {
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "relu": torch.relu,
    "abs": torch.abs,
    "clamp": torch.clamp,
    "pow": torch.pow,
}


@dataclass(frozen=True)
class Sink:
    """A column concatenated to the scores before the softmax and dropped after it, or what is the same.

    Attributes:
        term: the column: its node, leading dims and factor.
        first: whether it comes before the keys.
        has_column: whether the node has a last dim for the column.
    """

    term: Term
    first: bool
    has_column: bool = True


@dataclass(frozen=True)
class Result:
    """A product of the weights with values.

    Attributes:
        node: what holds it, and gets its value from the fused operation.
        v: the values, of shape (*lead, keys, dim).
        lead: leading dims of the product.
        shape: of the result as (*lead, q_len, v_dim), where the last two may be several dims each.
        dims: that is permuted by these to give `node`.
    """

    node: fx.Node
    v: Operand
    lead: tuple[Any, ...]
    shape: tuple[Any, ...]
    dims: tuple[int, ...]


@dataclass
class Attention:
    """One attention in the normal form.

    Attributes:
        q, k: operands of shape (*lead, length, dim); the lead of k broadcasts to that of q.
        stages: functions of the scores, in order; what follows is applied after the last one.
        scale: number that the scores are multiplied by.
        scalers: tensors or symbolic numbers, constant over queries or keys, that the scores are multiplied
            ("mul") or divided ("div") by, with the lead of their stage.
        terms: biases and fills, from the product to the softmax.
        sink: a logit of each row that takes weight and has no value.
        below_sink: number of terms that are applied before the sink is there.
        below_shift: number of terms that are applied before a number of each row is subtracted.
        zeroed: a fill of the weights with 0, after the softmax.
        keeps_nan: whether that is a product with 0, which is NaN for a fully masked row.
        drops_nan: whether weights that are NaN are set to 0.
        by_logsumexp: whether the weights are exp(s - logsumexp(s)), which are 1 in rows of a large number.
        renormalised: whether the weights are divided by their sum after that: 1, or 0 and a small number.
        behind: as `scalers`, of the weights.
        lead: leading dims of the product; `softmax_lead` those at the softmax.
        results: products of the weights with values, in graph order, of the same leading dims.
        chain: the nodes that the site consists of, each used by the next one only.
        readers: nodes that read the shape or dtype of the scores, not their values.
        partners: other softmaxes on the same scores, each of an attention by itself.
    """

    q: Operand
    k: Operand
    lead: tuple[Any, ...]
    softmax: fx.Node
    product: fx.Node
    scale: float = 1.0
    scalers: list[tuple[str, fx.Node, tuple[Any, ...]]] = field(default_factory=list)
    terms: list[Term] = field(default_factory=list)
    stages: list[Stage] = field(default_factory=list)
    sink: Sink | None = None
    below_sink: int = 0
    below_shift: int = 0
    zeroed: Term | None = None
    keeps_nan: bool = False
    drops_nan: bool = False
    by_logsumexp: bool = False
    renormalised: bool = False
    behind: list[tuple[str, Any, tuple[Any, ...]]] = field(default_factory=list)
    dropout: float = 0.0
    softmax_lead: tuple[Any, ...] = ()
    results: list[Result] = field(default_factory=list)
    chain: list[fx.Node] = field(default_factory=list)
    readers: list[fx.Node] = field(default_factory=list)
    partners: list[fx.Node] = field(default_factory=list)

    @property
    def output(self) -> fx.Node:
        """The first result."""
        return self.results[0].node

    @property
    def outputs(self) -> list[fx.Node]:
        return [result.node for result in self.results]

    @property
    def v(self) -> Operand:
        """The values, those of several products beside each other."""
        first, *others = (result.v for result in self.results)
        return first.beside(others) if others else first

    def ends_behind(self, node: fx.Node) -> None:
        """Let the only result be held by a node behind the product."""
        self.results = [replace(self.results[0], node=node)]

    def read_on_the_way(self) -> Iterator[fx.Node]:
        """Every tensor that acts on the scores or the weights."""
        parts: list[Stage | Attention] = [*self.stages, self]
        for part in parts:
            yield from (source(term.node) for term in part.terms)
            yield from (source(node) for _, node, _ in part.scalers)
        yield from (source(node) for _, node, _ in self.behind if not isinstance(node, (int, float)))
        yield from (source(stage.operand.node) for stage in self.stages if stage.operand is not None)
        if self.sink is not None:
            yield source(self.sink.term.node)
        if self.zeroed is not None:
            yield source(self.zeroed.node)
