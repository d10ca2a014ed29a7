"""Down-projections that widen their input, before autograd.

PEFT's adapters are float32 beside a base of 16 bits. Autograd then keeps the widened input for the gradient
of A, twice the memory of the input that is there. After autograd it is too late: what is kept is settled. So
`F.linear(x.to(torch.float32), A)` becomes one operation here, which keeps x.

The sum with the base is float32 as well, and cast to 16 bits. Its gradient is rounded to them and widened
again. Where Inductor takes that out, the gradient is in memory in both dtypes. An operation that only marks
the rounded sum, until the fusion of adapters reads the graph, prevents it.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from ..._inductor import drops_narrow_casts, fake_mode_of, suppress_guards
from ...fusion import Candidate, Fusion, Rejected
from ...operands import check_device, check_kind, known_size, tensor, text
from ...writes import check_between, check_kept, effects
from . import narrow, profit
from .op import LORA_DOWN, ROUNDED
from .recognise import MOST_RANK

#: What a product passes on its way into a sum.
_SUMS = (operator.add, operator.iadd, operator.mul, torch.add, torch.mul)


@dataclass(frozen=True)
class Site:
    """`F.linear(x.to(torch.float32), a)`.

    Attributes:
        linear: the node that is replaced.
        wide: the cast of x.
        x: the input, of 16 bits.
        a: the weight.
    """

    linear: fx.Node
    wide: fx.Node
    x: fx.Node
    a: fx.Node


def candidates(graph: fx.Graph) -> Iterator[Candidate]:
    """Every down-projection of a widened input that is trained."""
    known: list[fx.Node] | None = None
    for node in list(graph.nodes):
        site = _read(node)
        if site is not None:
            known = effects(graph) if known is None else known
            yield WidenedInput(graph, site, known)


def _read(node: fx.Node) -> Site | None:
    """A down-projection that another linear reads."""
    if not _is_linear(node) or not _ups(node):
        return None
    wide, a = node.args[:2]
    x = _widened(wide)
    if x is None or not _is_adapter(x, a):
        return None
    assert isinstance(wide, fx.Node) and isinstance(a, fx.Node)
    return Site(node, wide, x, a)


def _is_linear(node: Any, biased: bool = False) -> bool:
    if not isinstance(node, fx.Node) or node.op != "call_function" or node.target is not F.linear:
        return False
    bias = node.args[2] if len(node.args) > 2 else node.kwargs.get("bias")
    return len(node.args) >= 2 and (biased or bias is None)


def _ups(down: fx.Node) -> list[fx.Node]:
    """The linears, with a bias or without, that read the result of a down-projection."""
    return [user for user in down.users if _is_linear(user, biased=True) and user.args[0] is down]


def _widened(node: Any) -> fx.Node | None:
    """What a float32 tensor was cast from, if that has 16 bits and is cast alone."""
    found = tensor(node)
    if found is None or found.dtype != torch.float32 or node.op != "call_method":
        return None
    if node.target not in ("to", "float", "type") or not isinstance(node.args[0], fx.Node):
        return None
    x = tensor(node.args[0])
    if x is None or x.dtype != torch.bfloat16 or x.device != found.device or x.dim() < 2:
        return None
    return node.args[0]


def _rounded_sum(up: fx.Node, dtype: torch.dtype) -> fx.Node | None:
    """The cast to a dtype of the sum that a float32 product is added to, if nothing else reads that."""
    node = up
    while len(node.users) == 1:
        (user,) = node.users
        found = tensor(user)
        if found is None:
            return None
        if user.op == "call_method" and user.target in ("to", "type", "type_as", "bfloat16"):
            return user if found.dtype == dtype else None
        if user.target not in _SUMS or found.dtype != torch.float32:
            return None
        node = user
    return None


def _is_adapter(x: fx.Node, a: Any) -> bool:
    """Whether a weight is a narrow matrix of float32 that is trained, and multiplied as it is."""
    weight, value = tensor(a), tensor(x)
    if weight is None or value is None or weight.dim() != 2 or not weight.requires_grad:
        return False
    device = value.device.type
    if weight.dtype != torch.float32 or (
        torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
    ):
        return False
    rank, inner = weight.shape
    return isinstance(rank, int) and rank <= MOST_RANK and isinstance(inner, int) and 2 * rank <= inner


class WidenedInput(Candidate):
    """A down-projection of a widened input.

    Args:
        graph: the graph.
        site: what it is.
        known: the `effects` of the graph.
    """

    def __init__(self, graph: fx.Graph, site: Site, known: Sequence[fx.Node]) -> None:
        self.graph, self.site, self.known = graph, site, known
        self.anchor = site.linear
        self.kernel = ""

    def describe(self) -> dict[str, str]:
        return {"input": text(tensor(self.site.x)), "adapter": text(tensor(self.site.a))}

    def guard(self) -> None:
        site = self.site
        x, a, out = tensor(site.x), tensor(site.a), tensor(site.linear)
        assert x is not None and a is not None and out is not None
        check_kind(x, a, out)
        if out.dtype != torch.float32:
            raise Rejected("operands of several dtypes, or under autocast")
        check_between([site.wide], site.linear, "the cast and the linear", self.known)
        check_kept([site.x, site.a], site.linear, self.known)
        check_device(x)
        tokens: Any = 1
        for size in x.shape[:-1]:
            tokens = tokens * size
        shape = narrow.Shape(
            int(x.shape[-1]), known_size(tokens), (int(a.shape[0]),), "t",
            x.dtype, a.dtype,
        )  # fmt: skip
        self.kernel = profit.narrow_kernel(shape, x.device)

    def rewrite(self) -> str:
        site, x = self.site, tensor(self.site.x)
        assert x is not None
        old = site.linear
        mode = fake_mode_of(self.graph)
        with self.graph.inserting_before(old):
            new = self.graph.call_function(LORA_DOWN, (site.x, site.a))
        if "stack_trace" in old.meta:
            new.meta["stack_trace"] = old.meta["stack_trace"]
        with suppress_guards(mode):
            new.meta["example_value"] = old.meta["example_value"]
        ups = _ups(old)
        old.replace_all_uses_with(new)
        self.graph.erase_node(old)
        if not site.wide.users:
            self.graph.erase_node(site.wide)
        for up in ups if drops_narrow_casts() else ():
            self._mark(_rounded_sum(up, x.dtype))
        return self.kernel

    def _mark(self, rounded: fx.Node | None) -> None:
        if rounded is None or any(user.target is ROUNDED for user in rounded.users):
            return
        with self.graph.inserting_after(rounded):
            marked = self.graph.call_function(ROUNDED, (rounded,))
        marked.meta.update(rounded.meta)
        rounded.replace_all_uses_with(marked, delete_user_cb=lambda user: user is not marked)


FUSION = Fusion(
    name="lora_input",
    stage="pre_grad",
    summary="float32 adapters keep the input as it is for their gradient, not widened",
    recognise=candidates,
)
