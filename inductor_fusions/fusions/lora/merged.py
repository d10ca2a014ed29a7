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

import torch.nn.functional as F
from torch import fx

from ... import config
from ...derivatives import check_operation
from ...fusion import Candidate, LeftToStock, Rejected
from ...graph.builder import Builder
from ...graph.torch_ops import Op, read
from ...liveness import erase_dead_readers, readers
from ...operands import check_device, check_kind, tensor, text
from ...reasons import Reason
from ...writes import check_between, check_kept
from .adapters import MOST_RANK
from .inputs import Inputs

if TYPE_CHECKING:
    from ..._inductor import Match

#: What gives the merged matrix another shape: its own.
_VIEWS = frozenset({"view", "reshape", "contiguous"})


@dataclass(frozen=True)
class Merged:
    """A linear whose weight is `w + scale * (b @ a)`.

    Attributes:
        linear: the node.
        between: what makes the weight, in order: the product of b and a first, the sum last.
        x, w, a, b: its operands.
        bias: or None.
        scale: the factor.
    """

    linear: fx.Node
    between: tuple[fx.Node, ...]
    x: fx.Node
    w: fx.Node
    a: fx.Node
    b: fx.Node
    bias: Any
    scale: float


def _merged(node: fx.Node) -> Merged | None:
    op = read(node)
    x, weight, bias = op.only("input", "weight", "bias") if op is not None else (None, None, None)
    total = read(weight)
    if not isinstance(x, fx.Node) or total is None or total.name != "add":
        return None
    first, second = total.only("input", "other")
    for w, delta in ((first, second), (second, first)):
        found = _delta(delta)
        if found is None or not isinstance(w, fx.Node) or not _fits(w, found[0]):
            continue
        product, between, scale = found
        b, a = product.only("input", "other")
        if isinstance(a, fx.Node) and isinstance(b, fx.Node) and _is_narrow(a, b):
            return Merged(node, (*between, total.node), x, w, a, b, bias, scale)
    return None


def _delta(node: Any) -> tuple[Op, list[fx.Node], float] | None:
    """The product that is scaled by numbers and viewed; the nodes from it on; and the factor."""
    between, scale = list[fx.Node](), 1.0
    while (op := read(node)) is not None and not op.inplace:
        between.insert(0, op.node)
        if op.name == "matmul":
            return op, between, scale
        if op.name in _VIEWS:
            node = op.input
            continue
        x, by = op.only("input", "other")
        if op.name == "mul" and isinstance(x, (int, float)):
            x, by = by, x
        if op.name not in ("mul", "div") or not isinstance(by, (int, float)) or (op.name == "div" and not by):
            return None
        node, scale = x, scale * by if op.name == "mul" else scale / by
    return None


def _fits(w: fx.Node, product: Op) -> bool:
    """Whether a weight that is not trained has the shape of a product."""
    weight, delta = tensor(w), tensor(product.node)
    if weight is None or delta is None or weight.requires_grad:
        return False
    return weight.dim() == 2 and tuple(weight.shape) == tuple(delta.shape)


def _is_narrow(a: fx.Node, b: fx.Node) -> bool:
    down, up = tensor(a), tensor(b)
    if down is None or up is None or down.dim() != 2 or up.dim() != 2:
        return False
    sizes = (*down.shape, up.shape[0])
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
        inner = make.call(F.linear, site.x, site.a)
        inner.meta["example_value"].requires_grad_()
        up = make.given(out, F.linear, inner, site.b)
        if site.scale != 1:
            up = make.given(out, operator.mul, up, site.scale)
        base = make.given(out, F.linear, site.x, w, site.bias)
        gone: Sequence[fx.Node] = (old, *reversed(site.between))
        erase_dead_readers(gone)
        old.replace_all_uses_with(make.given(out, operator.add, base, up))
        for node in gone:
            old.graph.erase_node(node)
        return "two products"


def merged_weight(scope: Inputs, match: Match) -> Candidate | None:
    """A linear with a weight that an adapter is added to."""
    site = _merged(match.output_node())
    return None if site is None else MergedWeight(site, scope)
