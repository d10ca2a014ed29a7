"""The gradients of an attention as matrix products.

With s = q k^T * scale + bias, p = softmax(s):

    dV = p^T dO,   ds = p (dO V^T - rowsum(p dO V^T)),   dQ = ds K * scale,   dK = ds^T Q * scale

Everything is in float32 at least.
"""

from __future__ import annotations

import math

import torch

aten = torch.ops.aten

_KERNELS = (
    "flash_attention_for_cpu", "flash_attention", "efficient_attention", "cudnn_attention",
    "fused_attention_overrideable",
)  # fmt: skip
#: What SDPA becomes, by the kernel that torch chooses.
SDPA_FORWARDS, SDPA_BACKWARDS = (
    frozenset(getattr(aten, f"_scaled_dot_product_{kernel}{way}").default for kernel in _KERNELS)
    for way in ("", "_backward")
)


def gradients(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bias: torch.Tensor | None,
    scale: float | None,
    causal: bool,
) -> tuple[torch.Tensor, ...]:
    """The gradients of q, k, v, and of the bias if there is one.

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
    # A fully masked row gives nothing to any gradient.
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
