"""The backward of flex attention as matrix products of the library, where that is measured to be faster.

The template computes five products a block in one kernel and keeps two accumulators of a whole block of keys.
At head dim 256 these fill the register file, and it runs at a third of what the library reaches. Here the
queries are split into chunks. For each chunk, the library computes the products over the keys that it may
see. What lies between them (score_mod, mask_mod, their gradient) is one pointwise kernel. Only the scores of
one chunk are in memory at a time.

With s = q k^T * scale, t = score_mod(s), p = exp2(t / ln 2 - lse) and D = rowsum(dO * O):

    dV = p^T dO,   dt = p (dO V^T - D),   ds = score_mod'(s) dt * scale,   dQ = ds K,   dK = ds^T Q

(Dao, FlashAttention-2, arXiv 2307.08691, section 3.1.2; lse counts in powers of two, as in
torch/_inductor/kernel/flex.)
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from ... import decisions
from ..._inductor import Match, flex_backward_op
from ...block_mm.guards import text
from ...fusion import Candidate, Fusion, Scope
from ...graph.inlined import put_in_place
from ...operands import value
from ...reasons import Reason
from .aliasing import Mutations
from .masks import Bool, Interpreter, affine, identity, is_condition, reduce, substitute

aten = torch.ops.aten

#: Parts into which lengths are cut to see which share of the scores may be visible.
PARTS = 16

Interval = tuple[int, int]


def predicate(mask: fx.GraphModule) -> Bool | None:
    """What a mask_mod (batch, head, query, key) -> bool says, in operations of aten; None where it is opaque.

    Its indices are numbers, those of the levels 1 to 4.
    """
    nodes = list(mask.graph.nodes)
    given = [node for node in nodes if node.op == "placeholder"][:4]
    known = {node: identity(level) for level, node in enumerate(given, 1)}
    return Interpreter(Mutations(mask.graph), known=known).boolean(nodes[-1].args[0])


def may_be_true(seen: Bool | None, queries: Interval, keys: Interval) -> bool:
    """Whether a query of a range may see a key of a range.

    Args:
        seen: what `predicate` gives.
    """
    index = {level: affine(first, {dim: 1}) for level, dim, first in ((3, -2, queries[0]), (4, -1, keys[0]))}
    within = substitute(seen, identity, index)
    sizes = [last - first + 1 for first, last in (queries, keys)]
    return not is_condition(within) or reduce(within, sizes) is not False


@dataclass(frozen=True)
class Arguments:
    """What the backward is called with; torch/_higher_order_ops/flex_attention.py names them."""

    q: Any
    k: Any
    v: Any
    out: Any
    lse: Any
    grad_out: Any
    grad_lse: Any
    forward: Any
    joint: Any
    block_mask: Any
    scale: Any
    options: Any
    score_captured: tuple[Any, ...] = ()
    mask_captured: tuple[Any, ...] = ()


#: The fields that hold tensors, one or several; the captured ones are tuples.
TENSORS = ("q", "k", "v", "out", "lse", "grad_out", "grad_lse", "score_captured", "mask_captured")


class FlexBackward(Candidate):
    """One backward of flex attention."""

    def __init__(self, graph: fx.Graph, node: fx.Node) -> None:
        self.graph, self.anchor = graph, node
        arguments: Any = node.args
        self.given = Arguments(*arguments)
        module = graph.owning_module
        assert module is not None
        mods = self.given.forward, self.given.joint, self.given.block_mask[-1]
        self.mods: list[Any] = [module.get_submodule(mod.target) for mod in mods]
        self.seen = predicate(self.mods[2])
        self.chunk = 0

    def describe(self) -> dict[str, str]:
        found = {name: getattr(self.given, name) for name in ("q", "k", "v")}
        return {name: text(t) for name, t in found.items()}

    def guard(self) -> None:
        given = self.given
        q, k, v = (value(t) for t in (given.q, given.k, given.v))
        if not all(isinstance(size, int) for t in (q, k, v) for size in t.shape):
            raise Reason.SYMBOLIC.left_to_stock(
                "the sizes are symbolic, and the chunked backward needs static ones"
            )
        if q.device.type != "cuda" or q.dtype not in (torch.float16, torch.bfloat16):
            raise Reason.NOT_FASTER.left_to_stock(
                "Inductor's flex attention template is as fast for this device and dtype"
            )
        if q.shape[0] != k.shape[0]:
            raise Reason.SHAPES.rejected("the samples of the batch share their keys")
        _, joint, mask = self.mods
        gradients = next(iter(reversed(joint.graph.nodes))).args[0]
        if any(g is not None for g in gradients[1:]):
            raise Reason.NOT_FASTER.left_to_stock("a captured tensor requires a gradient")
        if any("index" in str(node.target) for node in mask.graph.nodes):
            raise Reason.NOT_FASTER.left_to_stock(
                "the mask depends on data, and Inductor's template can skip the blocks that it hides"
            )
        self.chunk = decisions.flex_backward(
            device=q.device,
            dtype=q.dtype,
            batch_heads=q.shape[0] * q.shape[1],
            q_len=q.shape[2],
            kv_len=k.shape[2],
            head_dim=q.shape[3],
            visible=self._visible(),
        )
        if not self.chunk:
            raise Reason.NOT_FASTER.left_to_stock(
                "Inductor's flex attention template is at least as fast at this shape, as measured"
            )

    def _visible(self) -> float:
        """The share of the scores that may be visible."""
        lengths = [value(t).shape[2] for t in (self.given.q, self.given.k)]
        edges = [[part * n // PARTS for part in range(PARTS + 1)] for n in lengths]
        seen = sum(
            may_be_true(self.seen, (a, b - 1), (c, d - 1))
            for a, b in zip(edges[0], edges[0][1:], strict=False)
            for c, d in zip(edges[1], edges[1][1:], strict=False)
            if a < b and c < d
        )
        return seen / PARTS**2

    def _keys(self, first: int, last: int) -> tuple[int, int]:
        """First key, and the one behind the last, that some query of a chunk may see."""
        length, step = value(self.given.k).shape[2], 128
        seen = [
            start
            for start in range(0, length, step)
            if may_be_true(self.seen, (first, last), (start, min(start + step, length) - 1))
        ]
        return (seen[0], min(seen[-1] + step, length)) if seen else (0, 0)

    def rewrite(self) -> str:
        given = self.given

        def compute(tensors: dict[str, Any]) -> tuple[torch.Tensor, ...]:
            return Products(replace(given, **tensors), self.mods).gradients(self.chunk, self._keys)

        put_in_place(self.anchor, compute, ({name: getattr(given, name) for name in TENSORS},))
        return f"products in chunks of {self.chunk} queries"


class Products:
    """dq, dk and dv by the formulas above. Query heads that share keys are rows of one product.

    Args:
        given: what the backward is called with, as tensors.
        mods: score_mod, its gradient and mask_mod.
    """

    def __init__(self, given: Arguments, mods: Sequence[Any]) -> None:
        self.given, (self.forward, self.joint, self.mask) = given, mods
        k, v = given.k, given.v
        self.batch, self.heads, self.q_len, self.dim = given.q.shape
        self.shared, self.kv_len = k.shape[1], k.shape[2]
        self.groups = self.heads // self.shared
        self.delta = (given.out.float() * given.grad_out.float()).sum(-1)
        if given.grad_lse is not None:
            self.delta = self.delta - given.grad_lse / math.log(2.0)
        self.lse = torch.where(given.lse == -math.inf, 0.0, given.lse)
        self.keys, self.values = (
            t.reshape(self.batch * self.shared, self.kv_len, t.shape[3]) for t in (k, v)
        )
        self.owner = self._index(self.batch * self.shared, 0)

    def gradients(
        self, chunk: int, keys: Callable[[int, int], Interval]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The gradients, with the shapes and the dtype of q, k and v.

        Args:
            chunk: queries at a time.
            keys: first key, and the one behind the last, that some query from a first to a last one may see.
        """
        q, v = self.given.q, self.given.v
        dq: list[torch.Tensor] = []
        parts_of_k: list[tuple[int, int, torch.Tensor]] = []
        parts_of_v: list[tuple[int, int, torch.Tensor]] = []
        for first in range(0, self.q_len, chunk):
            last = min(first + chunk, self.q_len)
            low, high = keys(first, last - 1)
            if low == high:
                dq.append(torch.zeros_like(q[:, :, first:last]))
                continue
            own_dq, own_dk, own_dv = self._of_chunk((first, last), (low, high))
            dq.append(own_dq)
            parts_of_k.append((low, high, own_dk))
            parts_of_v.append((low, high, own_dv))
        dk, dv = self._total(parts_of_k, self.dim), self._total(parts_of_v, v.shape[3])
        dk, dv = (t.view(self.batch, self.shared, self.kv_len, -1).to(q.dtype) for t in (dk, dv))
        return torch.cat(dq, 2), dk, dv

    def _of_chunk(self, queries: Interval, keys: Interval) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """What queries and keys, each from a first one to one behind the last, give to dq, dk and dv."""
        given, (first, last), (low, high) = self.given, queries, keys
        count, scale = last - first, given.scale
        q, grad_out = self._rows(given.q, queries), self._rows(given.grad_out, queries)
        k, v = self.keys[:, low:high], self.values[:, low:high]
        row = self._index(self.groups * count, 1)
        where = (
            self.owner // self.shared,
            self.owner % self.shared * self.groups + row // count,
            row % count + first,
            self._index(high - low, 2) + low,
        )
        scores = torch.bmm(q, k.transpose(1, 2)).float() * scale
        seen = self.mask(*where, *given.mask_captured)
        log2 = self.forward(scores, *where, *given.score_captured) * (1 / math.log(2.0))
        p = torch.where(seen, torch.exp2(log2 - self._rows(self.lse, queries)[..., None]), 0.0)
        dp = torch.bmm(grad_out, v.transpose(1, 2)).float()
        dt = p * (dp - self._rows(self.delta, queries)[..., None])
        ds = self.joint(scores, *where, dt, *given.score_captured)[0] * scale
        ds, p = torch.where(seen, ds, 0.0).to(q.dtype), p.to(q.dtype)
        dq = torch.bmm(ds, k).view(self.batch, self.heads, count, self.dim)
        return dq, torch.bmm(ds.transpose(1, 2), q), torch.bmm(p.transpose(1, 2), grad_out)

    def _rows(self, t: torch.Tensor, queries: Interval) -> torch.Tensor:
        """The queries of a chunk as (batch * shared, groups * queries, ...)."""
        first, last = queries
        shape = (self.batch * self.shared, self.groups * (last - first), *t.shape[3:])
        return t[:, :, first:last].reshape(shape)

    def _index(self, count: int, place: int) -> torch.Tensor:
        """0, 1, ... along one of three dims."""
        numbers = torch.arange(count, device=self.given.q.device, dtype=torch.int32)
        return numbers.view([-1 if d == place else 1 for d in range(3)])

    def _total(self, parts: list[tuple[int, int, torch.Tensor]], size: int) -> torch.Tensor:
        """The sum of what the chunks give to each key: (batch * shared, keys, size), in float32.

        Args:
            parts: first key, the one behind the last, and what they get.
        """
        edges = sorted({0, self.kv_len, *(low for low, _, _ in parts), *(high for _, high, _ in parts)})
        found = []
        for first, last in itertools.pairwise(edges):
            within = [(low, t) for low, high, t in parts if low <= first and last <= high]
            total = sum(t[:, first - low : last - low].float() for low, t in within)
            if not isinstance(total, torch.Tensor):  # keys that no query sees
                shape = (self.batch * self.shared, last - first, size)
                total = torch.zeros(shape, device=self.given.q.device)
            found.append(total)
        return torch.cat(found, 1)


FUSION = Fusion(
    name="flex_backward",
    stage="post_grad",
    summary="the backward of flex attention to library GEMMs, for wide heads",
)


@FUSION.anchor(lambda: [flex_backward_op()])
def read(scope: Scope, match: Match) -> Candidate:
    """A backward of flex attention."""
    return FlexBackward(scope.graph, match.output_node())
