"""Adapters that are merged into a frozen weight in each step, before autograd: as two products.

    F.linear(x, w + s * (b @ a), c)    ->    F.linear(x, w, c) + s * F.linear(F.linear(x, a), b)

Autograd computes the gradient of the merged weight, one of three products of a step, and multiplies it by a
and b. As two products no such gradient is there, and no merged weight. loralib, minLoRA, LyCORIS and PEFT's
ParamWrapper merge so.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import fx

from ... import config
from ...derivatives import check_operation
from ...fusion import Candidate, LeftToStock, Rejected, Reported
from ...graph.builder import Builder
from ...graph.torch_ops import CASTS, TRANSPOSES, VIEWS, linear_of, read
from ...liveness import erase_dead_readers, readers
from ...operands import check_device, check_kind, tensor, text
from ...reasons import Reason
from ...writes import check_between, check_kept
from .adapters import MOST_RANK
from .inputs import Inputs
from .second_product import scaled_by

if TYPE_CHECKING:
    from ..._inductor import Match

#: What gives the merged matrix another shape: its own.
_VIEWS = frozenset({"view", "reshape", "contiguous"})
#: What a weight is computed by from the product of an adapter: LoHa, LoKr, and DoRA among others.
_FROM = VIEWS | TRANSPOSES | CASTS | frozenset("add sub mul div neg contiguous getattr kron".split())
_MOST_STEPS = 32


@dataclass(frozen=True)
class Merged:
    """A linear whose weight is `w + scale * (b @ a)`.

    Attributes:
        linear: the node.
        between: what makes the weight, in order: the product of b and a first, the sum last.
        x, w, a, b: its operands.
        bias: or None.
        scale: the factor.
        rows: whether it is `F.linear`; else `x @ (w + scale * (a @ b))`.
    """

    linear: fx.Node
    between: tuple[fx.Node, ...]
    x: fx.Node
    w: fx.Node
    a: fx.Node
    b: fx.Node
    bias: Any
    scale: float
    rows: bool


#: A product, its operands, the nodes from it on, and the factor.
_Delta = tuple[fx.Node, Any, Any, list[fx.Node], float]


def _merged(node: fx.Node) -> Merged | None:
    found = linear_of(node)
    if found is None:
        return None
    x, weight, rows, bias = found
    total = read(weight)
    if total is None or (bias is not None and not rows):
        return None
    if total.name == "addmm":
        w, b, a, alpha = total.only("input", "mat1", "other", "alpha")
        scale = 1.0 if alpha is None else alpha
        pairs: list[tuple[Any, _Delta | None]] = []
        pairs += [(w, (total.node, b, a, [], scale))] if isinstance(scale, (int, float)) else []
    elif total.name in ("add", "sub"):
        first, second = total.only("input", "other")
        pairs = [(first, _delta(second, -1.0 if total.name == "sub" else 1.0))]
        pairs += [(second, _delta(first, 1.0))] if total.name == "add" else []
    else:
        return None
    for w, delta in pairs:
        if delta is None or not isinstance(w, fx.Node) or not _fits(w, delta[0]):
            continue
        _, b, a, between, scale = delta
        if not rows:
            a, b = b, a
        if isinstance(a, fx.Node) and isinstance(b, fx.Node) and _is_narrow(a, b, rows):
            return Merged(node, (*between, total.node), x, w, a, b, bias, scale, rows)
    return None


def _delta(node: Any, scale: float) -> _Delta | None:
    """The product that is scaled by numbers and viewed."""
    between = list[fx.Node]()
    while (op := read(node)) is not None and not op.inplace:
        between.insert(0, op.node)
        if op.name == "matmul":
            return op.node, *op.only("input", "other"), between, scale
        if op.name in _VIEWS:
            node = op.input
            continue
        step = scaled_by(op)
        if step is None:
            return None
        node, scale = step[0], scale * step[1]
    return None


def _low_rank(weight: fx.Node) -> int:
    """The rank of a product of two narrow matrices that a matrix is computed from; 0 where there is none."""
    seen, waiting = set[fx.Node](), [weight]
    while waiting and len(seen) < _MOST_STEPS:
        node = waiting.pop()
        op, value = read(node), tensor(node)
        if node in seen or op is None or value is None:
            continue
        seen.add(node)
        if op.name in ("matmul", "addmm"):
            left = tensor(op["mat1"] if op.name == "addmm" else op.input)
            sizes: list[Any] = [] if left is None else [left.shape[-1], *value.shape]
            if len(sizes) == 3 and all(isinstance(size, int) for size in sizes):
                rank = int(sizes[0])
                if rank <= MOST_RANK and 2 * rank <= min(sizes[1:]):
                    return rank
        elif op.name in _FROM:
            waiting += node.all_input_nodes
    return 0


def _fits(w: fx.Node, product: fx.Node) -> bool:
    """Whether a weight that is not trained has the shape of a product."""
    weight, delta = tensor(w), tensor(product)
    if weight is None or delta is None or weight.requires_grad:
        return False
    return weight.dim() == 2 and tuple(weight.shape) == tuple(delta.shape)


def _is_narrow(a: fx.Node, b: fx.Node, rows: bool) -> bool:
    down, up = tensor(a), tensor(b)
    if down is None or up is None or down.dim() != 2 or up.dim() != 2:
        return False
    sizes = (*(down.shape if rows else down.shape[::-1]), up.shape[0 if rows else 1])
    if not all(isinstance(size, int) for size in sizes):
        return False
    rank, inner, outer = sizes
    return bool(rank <= MOST_RANK and 2 * rank <= min(inner, outer))


class MergedWeight(Candidate):
    """A linear whose adapter is merged.

    Args:
        site: what it is.
        known: of the graph.
    """

    def __init__(self, site: Merged, known: Inputs) -> None:
        self.site, self.known, self.anchor = site, known, site.linear

    def describe(self) -> dict[str, str]:
        named = ("input", self.site.x), ("weight", self.site.w), ("a", self.site.a)
        return {name: text(tensor(node)) for name, node in named}

    def guard(self) -> None:
        site, known = self.site, self.known
        values = [tensor(node) for node in (site.x, site.w, site.a, site.b, *site.between, site.linear)]
        found = [value for value in values if value is not None]
        check_kind(*found)
        if any(value.dtype != found[0].dtype for value in found):
            raise Rejected(Reason.MIXED_DTYPES("the operands have different dtypes, or autocast is on"))
        for node, reader in zip(site.between, (*site.between[1:], site.linear), strict=True):
            if readers(node) != [reader]:
                raise Rejected(Reason.USED_ELSEWHERE("the merged weight is also used elsewhere"))
        nodes = [*site.between, site.linear]
        check_between(nodes, site.linear, "the merge and the linear", known.modes, known.effects)
        check_kept([site.x, site.w, site.a, site.b], site.linear, known.effects)
        check_operation(nodes, known.derivatives)
        check_device(found[0])
        _, _, a, b, *_, out = found
        if config.policy != "always" or not (out.requires_grad and (a.requires_grad or b.requires_grad)):
            raise LeftToStock(
                Reason.NOT_MEASURED(
                    "the adapter is merged into the weight in each step, and no measurement covers its form "
                    "as two products"
                ),
                "F.linear(x, w) + s * F.linear(F.linear(x, a), b)",
            )

    def rewrite(self) -> str:
        site, old = self.site, self.site.linear
        w = self.known.keeping.kept(site.w, old)  # eager keeps the merged weight
        make, out = Builder(old), tensor(old)
        times: Any = F.linear if site.rows else torch.matmul
        inner = make.call(times, site.x, site.a)
        inner.meta["example_value"].requires_grad_()
        up = make.given(out, times, inner, site.b)
        if site.scale != 1:
            up = make.given(out, operator.mul, up, site.scale)
        base = make.given(out, times, site.x, w, *([site.bias] if site.rows else []))
        gone: Sequence[fx.Node] = (old, *reversed(site.between))
        erase_dead_readers(gone)
        old.replace_all_uses_with(make.given(out, operator.add, base, up))
        for node in gone:
            old.graph.erase_node(node)
        return "two products"


def merged_weight(scope: Inputs, match: Match) -> Candidate | None:
    """A linear with a weight that an adapter is added to, or that is computed from one otherwise."""
    node = match.output_node()
    site, found = _merged(node), linear_of(node)
    if site is not None:
        return MergedWeight(site, scope)
    rank = _low_rank(found[1]) if found is not None else 0
    if not rank:
        return None
    why = Reason.MERGED(
        f"the weight is computed in each step from a product of rank {rank}, in another form than a frozen "
        "weight plus a number times the product"
    )
    return Reported(node, Rejected(why), {"input": text(tensor(node.all_input_nodes[0]))})
