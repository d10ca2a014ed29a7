"""The backward of a fused attention as matrix products, for where its kernel is refused.

With s = q k^T * scale + bias, p = softmax(s):

    dV = p^T dO,   ds = p (dO V^T - rowsum(p dO V^T)),   dQ = ds K * scale,   dK = ds^T Q * scale

Everything is in float32 at least, and of the size of the scores: no part of a compile that does not fail.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import fx

from ._inductor import flex_backward_op, hint
from .fusions.block_mm.inlined import put_in_place
from .fusions.flex_backward import FlexBackward
from .reporting import TAG

aten = torch.ops.aten

#: Backwards of SDPA, and what their arguments are called here.
_BACKWARDS = frozenset(
    {
        getattr(aten, f"_scaled_dot_product_{name}_backward").default
        for name in (
            "flash_attention_for_cpu", "flash_attention", "efficient_attention", "cudnn_attention",
            "fused_attention_overrideable",
        )
    }
)  # fmt: skip
_NAMES = {
    "grad_out": "grad", "grad_out_": "grad", "query": "q", "key": "k", "value": "v", "attn_bias": "bias",
    "attn_mask": "bias", "dropout_p": "dropout", "is_causal": "causal",
}  # fmt: skip


def backwards(graph: fx.Graph) -> list[fx.Node]:
    """The backwards of attentions in an aten graph that a fusion of this package has put there."""
    ours = [node for node in graph.nodes if node.op == "call_function" and TAG in node.meta.get("custom", {})]
    return [node for node in ours if node.target in _BACKWARDS or node.target is flex_backward_op()]


def write_out(graph: fx.Graph) -> None:
    """Put products in the place of these, in the graph.

    Raises:
        Rejected, ValueError: one cannot be written so.
    """
    for node in backwards(graph):
        if node.target is flex_backward_op():
            attention = FlexBackward(graph, node)
            attention.chunk = hint(attention.given.q.meta["val"].shape[2])
            attention.rewrite()
        else:
            _write(node)
    graph.lint()


def _write(node: fx.Node) -> None:
    target: Any = node.target
    names = [_NAMES.get(argument.name, argument.name) for argument in target._schema.arguments]
    given = {
        **dict(zip(names, node.args, strict=False)),
        **{_NAMES.get(k, k): v for k, v in node.kwargs.items()},
    }
    if given.get("dropout"):
        raise ValueError("its dropout is drawn by the kernel that was refused")
    held = [given.get(name) for name in ("grad", "q", "k", "v", "bias")]
    present = [each for each in held if isinstance(each, fx.Node)]
    scale, causal = given.get("scale"), bool(given.get("causal"))

    def compute(*values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        left = iter(values)
        every: list[Any] = [next(left) if isinstance(each, fx.Node) else None for each in held]
        grad, q, k, v, bias = every
        return gradients(grad, q, k, v, bias, scale, causal)

    put_in_place(node, compute, present)


def gradients(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bias: torch.Tensor | None,
    scale: float | None,
    causal: bool,
) -> tuple[torch.Tensor, ...]:
    """dq, dk, dv, and that of the bias where there is one.

    Args:
        grad: (batch, heads, queries, value dim).
        q, k, v: (batch, heads, length, dim); k and v may have fewer heads.
        bias: added to the scores, or a mask of those that are seen; broadcast.
    """
    factor = scale if scale is not None else 1 / math.sqrt(q.shape[-1])
    wide = torch.promote_types(q.dtype, torch.float32)
    wide_grad, wide_q = grad.to(wide), q.to(wide)
    groups = q.shape[1] // k.shape[1]
    wide_k, wide_v = (
        each.to(wide).repeat_interleave(groups, 1) if groups > 1 else each.to(wide) for each in (k, v)
    )
    scores = wide_q @ wide_k.mT * factor
    if bias is not None and bias.dtype == torch.bool:
        scores = torch.where(bias, scores, -math.inf)
    elif bias is not None:
        scores = scores + bias.to(wide)
    if causal:
        rows = torch.arange(q.shape[2], device=q.device)[:, None]
        scores = torch.where(torch.arange(k.shape[2], device=q.device)[None] <= rows, scores, -math.inf)
    # A row that sees no key gives nothing to any gradient.
    most = scores.amax(-1, keepdim=True)
    powers = torch.exp(scores - torch.where(most == -math.inf, 0.0, most))
    total = powers.sum(-1, keepdim=True)
    weights = powers / torch.where(total == 0, 1.0, total)
    change = wide_grad @ wide_v.mT
    change = weights * (change - (weights * change).sum(-1, keepdim=True))
    made = [change @ wide_k * factor, change.mT @ wide_q * factor, weights.mT @ wide_grad]
    if groups > 1:
        made[1:] = [each.unflatten(1, (-1, groups)).sum(2) for each in made[1:]]
    found = [each.to(like.dtype) for each, like in zip(made, (q, k, v), strict=True)]
    if bias is not None and bias.dtype != torch.bool:
        shared = [dim for dim in range(change.dim()) if bias.shape[dim] == 1 and change.shape[dim] != 1]
        found.append((change.sum(shared, keepdim=True) if shared else change).to(bias.dtype))
    return tuple(found)
