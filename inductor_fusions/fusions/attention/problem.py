"""The problem that all attention kernels take, in 4-D tensors. `canonical` builds it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from ..._inductor import holds_now, known_true, value_of
from ...graph import torch_ops
from ...operands import check_random_numbers, holds, requires_grad, same_shape
from ...reasons import Reason
from .masks import holds_fills_alone
from .normal_form import Result, Stage, Term
from .operands import Operand
from .structure import Structure

#: "mul" or "div", and by what: a tensor on (batch, heads, length or 1, 1), or the node of a symbolic number.
#: "shift" adds zero times the tensor; "hide" and "show" set the rows where it is true, or false, to 0.
Scaler = tuple[str, Operand | fx.Node]


@dataclass
class Problem:
    """softmax(scale * q @ k^T + mask) @ v on (batch, heads, length, dim).

    Attributes:
        q, k, v: operands of one dtype; k and v have heads of their own (`groups` of q's heads share one).
        full_k, full_v: k and v with as many heads as q, as the graph has them.
        scale: number on the scores (None is SDPA's default; a node of the user's call may hold it).
        scalers: tensors or symbolic numbers that q is multiplied ("mul") or divided ("div") by.
        late_scalers: the same for the scores, after each of the stages.
        behind: the same for the result.
        key_scalers, value_scalers: the same for the keys and the values, which are written anew.
        dropout: probability on the weights.
        causal: key j is seen by query i exactly where j <= i, and nothing else hides it.
        terms: what is left of biases and fills, each with its operand on (batch, heads, q, k).
        attn_mask: the mask of a user's SDPA call, passed on as it is.
        stages: functions of the scores, each with its biases as (factor, operand) and its operand; the first
            one is applied to `first_scale * q @ k^T`, and `scale` is what multiplies the last one.
        sink: a logit of each row, on (batch, heads, q or 1, 1), and what it is multiplied by.
        structure: the mask as a predicate, where all of it is one.
        zeros: the boolean mask whose fully masked rows are zero, and whether it hides where it is true: that
            of a user's SDPA call, or where the weights are set to 0 after the softmax.
        overwritten: whether anything writes to the memory of a node, so that its value cannot be read anew.
        version: what has last written to the memory of a node before another one reads it: where that is the
            same for two readers, they read the same.
        dtype: dtype of the kernel (that of autocast, where it is on).
        results: what the result is for: with several, each is a range of its last dim, in order.
        train: whether a gradient flows into q, k or v, or into anything else that the result is made of.
        transformed: whether it is inside of torch.func.grad.
        autocast: whether autocast is on, which rounds what products are made of anyway.
    """

    q: Operand
    k: Operand
    v: Operand
    full_k: Operand
    full_v: Operand
    scale: Any
    dropout: float
    causal: bool
    terms: list[tuple[Term, Operand]]
    dtype: torch.dtype
    results: list[Result]
    scalers: list[Scaler] = field(default_factory=list)
    late_scalers: list[list[Scaler]] = field(default_factory=list)
    behind: list[Scaler] = field(default_factory=list)
    key_scalers: list[Scaler] = field(default_factory=list)
    value_scalers: list[Scaler] = field(default_factory=list)
    attn_mask: fx.Node | None = None
    train: bool = False
    transformed: bool = False
    autocast: bool = False
    stages: list[tuple[Stage, list[tuple[float, Operand]], Operand | None]] = field(default_factory=list)
    sink: tuple[Operand, float] | None = None
    structure: Structure | None = None
    zeros: tuple[Operand, bool] | None = None
    overwritten: Callable[[fx.Node], bool] = lambda node: True
    version: Callable[[fx.Node, fx.Node], object] = lambda node, before: object()

    @property
    def rounded_bias(self) -> torch.dtype | None:
        """The dtype of a bias that the kernel's dtype does not hold, so that SDPA would round it.

        A mask that the graph makes, low where a key is hidden and 0 elsewhere, may be rounded; and under
        autocast the scores that a bias is added to are rounded as well.
        """
        for term, operand in self.terms:
            dtype = operand.value.dtype
            plain = term.fill is None and dtype.is_floating_point and not holds_fills_alone(term.node)
            if plain and not self.autocast and not holds(self.dtype, dtype):
                return dtype
        return None

    @property
    def mask_nodes(self) -> list[Any]:
        """The tensors that are added to the scores or hide some of them."""
        return [term.node for term, _ in self.terms] + ([] if self.attn_mask is None else [self.attn_mask])

    @property
    def mask_learns(self) -> bool:
        """Whether one of these or the sink takes a gradient. In inference a parameter takes none either."""
        sink = [] if self.sink is None else [self.sink[0]]
        return self.train and any(map(requires_grad, (*self.mask_nodes, *sink)))

    @property
    def first_scale(self) -> Any:
        """What q @ k^T is multiplied by."""
        scale = self.stages[0][0].scale if self.stages else self.scale
        return float(self.q.shape[-1]) ** -0.5 if scale is None else scale

    @property
    def flex_kind(self) -> str:
        """Kind of mask as flex attention is told it: the class of its structure, where it has one."""
        if self.stages or self.sink is not None or self.structure is None or self.structure.visible is True:
            return self.mask_kind
        return self.structure.kind

    @property
    def mask_kind(self) -> str:
        """Kind of mask, as the tables of measurements name it."""
        functions = "".join(f"{stage.function} " for stage, _, _ in self.stages)
        if functions or self.sink is not None:
            hidden = self.structure.kind if self.structure is not None else "dense" if self.terms else ""
            return f"{functions}{'sink ' if self.sink is not None else ''}{hidden}".strip()
        if self.causal:
            return "causal"
        masks = [operand.shape for _, operand in self.terms]
        if self.attn_mask is not None:
            given = torch_ops.tensor(self.attn_mask)
            masks.append(given.shape if given is not None else torch.Size())
        if not masks:
            return "none"

        def varies(dim: int) -> bool:
            return any(len(shape) >= -dim and not known_true(shape[dim] == 1) for shape in masks)

        if varies(-3):
            return "bias_full" if varies(-4) else "bias"
        return "bias_batch" if varies(-2) else "pad"


def check_sizes(problem: Problem) -> None:
    """Refuse what kernels raise for or do not define: nothing to attend with or to, or no weight left."""
    check_dropout(problem.dropout)
    check_not_empty(problem)
    for size in _sizes(problem):
        if not holds_now(size >= 1):
            raise Reason.EMPTY.rejected(f"the size {size} may be 0")
    if not all(isinstance(size, int) for size in _sizes(problem)) and _read_from_a_tensor(problem):
        raise Reason.EMPTY.rejected("a size is read from a tensor by item, and may be 0")


def _read_from_a_tensor(problem: Problem) -> bool:
    """Whether a size may be a number that `item` reads, for which AOTAutograd takes a symbol of its own.

    Dynamo guards on the number, and a condition that holds for its symbol is not known of the other one.
    """
    found: set[fx.Node] = set()
    for node in problem.q.node.graph.nodes:
        op, inputs = torch_ops.read(node), found.intersection(node.all_input_nodes)
        if op is not None and op.name == "item":
            by_number = isinstance(value_of(node), (int, torch.SymInt))
        else:
            scales = op is not None and op.name in _ARITHMETIC and torch_ops.tensor(node) is not None
            by_number = bool(inputs) and (
                not scales or any(torch_ops.tensor(each) is not None for each in inputs)
            )
        if by_number:
            found.add(node)
    return not found.isdisjoint(operand.node for operand in (problem.q, problem.k, problem.v))


#: What takes a number, and gives a tensor the size of which is not that number.
_ARITHMETIC = frozenset({"add", "sub", "mul", "div"})


def check_dropout(p: float) -> None:
    """Refuse a dropout on the weights that the kernels do not compute as stock does."""
    if p >= 1:
        raise Reason.DROPOUT.rejected("dropout with p = 1 sets all weights to 0")
    if p > 0:
        check_random_numbers()


def check_not_empty(problem: Problem) -> None:
    """Refuse where a size is known to be 0: no question about the problem has an answer then."""
    if any(known_true(size == 0) for size in _sizes(problem)):
        raise Reason.EMPTY.rejected("an operand is empty")


def _sizes(problem: Problem) -> tuple[Any, ...]:
    return (*problem.q.shape, problem.k.shape[2], problem.v.shape[3])


def is_in_rows(value: torch.Tensor) -> bool:
    """Whether the last dim of a tensor lies in order in memory, and rows do not overlap.

    SDPA for a CPU computes garbage for queries whose rows begin one element apart, as `unfold` makes them
    (seen on 2.13).
    """
    if not known_true(value.stride(-1) == 1):
        return False
    if value.dim() < 2 or known_true(value.shape[-2] == 1):
        return True
    step = value.stride(-2)
    return known_true(step == 0) or known_true(step >= value.shape[-1])


def is_number(operand: Operand) -> bool:
    """Whether a tensor has no dims of its own: one on a CPU may scale tensors on any device."""
    found = torch_ops.tensor(operand.node)
    return found is not None and found.dim() == 0


def same_problem_shapes(problem: Problem) -> bool:
    """Whether k and v fit q: one batch, heads that divide, one head dim for q and k."""
    q, k, v = problem.q.shape, problem.k.shape, problem.v.shape
    heads = known_true(q[1] == k[1]) or known_true(q[1] % k[1] == 0)
    return same_shape(k[:3], v[:3]) and known_true(q[0] == k[0]) and heads and known_true(q[3] == k[3])
