"""An attention, and its gradients, as matrix products.

With s = q k^T * scale + bias, p = softmax(s):

    O = p V
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


def flash(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """What `attention` returns, by flash attention, without a bias."""
    made = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, False, False, scale=scale)
    return made[0], made[1].unsqueeze(-1)


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor | None, scale: float, causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """The output, in the dtype of q, and the logsumexp (batch, heads, queries, 1) in float32.

    Args:
        q, k, v, bias: as those of `gradients`.
    """
    wide_q, wide_k, wide_v = _wide(q, k, v)
    weights, logsumexp = _softmax(wide_q, wide_k, bias, scale, causal)
    return (weights @ wide_v).to(q.dtype), logsumexp.float()


def gradients(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bias: torch.Tensor | None,
    scale: float,
    causal: bool,
) -> tuple[torch.Tensor, ...]:
    """The gradients of q, k, v, and of the bias if there is one.

    Args:
        grad: (batch, heads, queries, value dim).
        q, k, v: (batch, heads, length, dim); k and v may have fewer heads.
        bias: added to the scores, or a mask of those that are seen; broadcast.
    """
    wide_q, wide_k, wide_v = _wide(q, k, v)
    weights, _ = _softmax(wide_q, wide_k, bias, scale, causal)
    wide_grad = grad.to(wide_q.dtype)
    change = wide_grad @ wide_v.mT
    change = weights * (change - (weights * change).sum(-1, keepdim=True))
    made = [change @ wide_k * scale, change.mT @ wide_q * scale, weights.mT @ wide_grad]
    groups = q.shape[1] // k.shape[1]
    if groups > 1:
        made[1:] = [each.unflatten(1, (-1, groups)).sum(2) for each in made[1:]]
    found = [each.to(like.dtype) for each, like in zip(made, (q, k, v), strict=True)]
    if bias is not None and bias.dtype != torch.bool:
        shared = [dim for dim in range(change.dim()) if bias.shape[dim] == 1 and change.shape[dim] != 1]
        found.append((change.sum(shared, keepdim=True) if shared else change).to(bias.dtype))
    return tuple(found)


def _wide(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> list[torch.Tensor]:
    """q, k and v in float32 at least, with as many heads."""
    dtype, groups = torch.promote_types(q.dtype, torch.float32), q.shape[1] // k.shape[1]
    repeated = (
        each.to(dtype).repeat_interleave(groups, 1) if groups > 1 else each.to(dtype) for each in (k, v)
    )
    return [q.to(dtype), *repeated]


def _softmax(
    q: torch.Tensor, k: torch.Tensor, bias: torch.Tensor | None, scale: float, causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """The weights, 0 in fully masked rows, which give nothing to any gradient; and the logsumexp."""
    scores = q @ k.mT * scale
    if bias is not None and bias.dtype == torch.bool:
        scores = torch.where(bias, scores, -math.inf)
    elif bias is not None:
        scores = scores + bias.to(q.dtype)
    if causal:
        rows = torch.arange(q.shape[2], device=q.device)[:, None]
        scores = torch.where(torch.arange(k.shape[2], device=q.device)[None] <= rows, scores, -math.inf)
    most = scores.amax(-1, keepdim=True)
    powers = torch.exp(scores - torch.where(most == -math.inf, 0.0, most))
    total = powers.sum(-1, keepdim=True)
    return powers / torch.where(total == 0, 1.0, total), most + total.log()
