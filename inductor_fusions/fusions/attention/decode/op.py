"""`inductor_fusions::decode_attention`, and what it needs of a mask: `decode_tiles` and `lowest_of`.

All layers of a model have one mask. The tiles of keys that it shows to any query are found once, at run time
and on the device. The attentions read the keys and values of those tiles alone. Inductor launches the kernels
as it does its own. On devices without them the operations are what torch makes of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ....decisions import unsupported
from ....lowering import define

#: Dtypes of q, k and v that the kernels take.
DTYPES = (torch.bfloat16, torch.float16)
#: Dtypes of masks that are added.
MASKS = (torch.float32, torch.bfloat16, torch.float16)
#: The widest heads that they take.
MOST_DIM = 256
#: Rows of a tile at most: queries of heads that share keys.
TILE_ROWS = 32


def lowest_of(
    mask: Any, dtype: torch.dtype, call: Callable[..., Any] = lambda function, *args: function(*args)
) -> Any:
    """The largest number with which an additive mask hides a key from a query: (B or 1, H or 1, Q or 1).

    That is the lowest number of its dtype. Beside a key that it does not hide, the weight of such a key is
    exp(lowest - highest) = 0. Where it hides all keys of a query with that number, it hides none: the scores
    differ as SDPA has them, and only -inf hides.

    Args:
        mask: (B or 1, H or 1, Q or 1, K); what `call` takes for a tensor.
        call: calls a function of torch, or adds a call to a graph.
    """
    least = torch.finfo(dtype).min
    return call(torch.where, call(torch.any, call(torch.gt, mask, least), -1), least, -math.inf)


def _has_kernel(q: Tensor) -> bool:
    """Whether there are kernels for the device of a tensor."""
    return not unsupported(q.device)


def _launches(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *_: Any) -> bool:
    """Whether the kernels compute this."""
    known = mask is None or mask.dtype == torch.bool or mask.dtype in MASKS
    if not (_has_kernel(q) and q.dtype in DTYPES and known):
        return False
    return bool(q.shape[3] <= MOST_DIM and v.shape[3] <= MOST_DIM)


def _check(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool) -> None:
    if not q.dim() == k.dim() == v.dim() == 4 or (mask is not None and mask.dim() != 4):
        raise ValueError("q, k, v and the mask of decode_attention must be 4-D")
    if not (q.is_floating_point() and q.dtype == k.dtype == v.dtype):
        raise ValueError("q, k and v of decode_attention need one floating dtype")
    if k.shape[1] != v.shape[1] or q.shape[1] % k.shape[1] or k.shape[3] != q.shape[3]:
        raise ValueError("the numbers of heads of decode_attention do not match")
    torch._check(k.shape[0] == q.shape[0], lambda: "q and k have different batches")
    torch._check(v.shape[0] == q.shape[0], lambda: "q and v have different batches")
    torch._check(v.shape[2] == k.shape[2], lambda: "k and v have different lengths")
    if mask is None:
        return
    if causal:
        raise ValueError("decode_attention accepts either a mask or is_causal")
    if mask.dtype != torch.bool and not mask.is_floating_point():
        raise ValueError("the mask of decode_attention must be boolean or floating")
    torch._check(mask.shape[3] == k.shape[2], lambda: "the mask has not one column for each key")


def _decode_tiles(mask: Tensor, lowest: Tensor | None, kv_heads: int, block_n: int) -> Tensor:
    """(B or 1, kv_heads or 1, 1 + tiles), int32: how many tiles of keys the mask shows, and which ones."""
    if _has_kernel(mask):
        from . import kernels

        with torch.cuda.device_of(mask):  # Triton launches on the current one
            return kernels.order(mask, lowest, kv_heads, block_n)
    shown = _shown(mask, lowest)
    shown = shown.any(2) if shown.shape[1] == 1 else shown.unflatten(1, (kv_heads, -1)).any((2, 3))
    count = (shown.shape[2] + block_n - 1) // block_n
    shown = torch.nn.functional.pad(shown, (0, count * block_n - shown.shape[2]))
    seen = shown.unflatten(2, (count, block_n)).any(3)
    listed = torch.argsort((~seen).to(torch.int8), stable=True, dim=-1)
    return torch.cat([seen.sum(-1, keepdim=True), listed], -1).to(torch.int32)


def _decode_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, lowest: Tensor | None, listed: Tensor | None,
    scale: float, causal: bool, most_queries: int, tiles: list[int],
) -> Tensor:  # fmt: skip
    """`tiles`: keys of a tile, parts of the keys, warps and stages."""
    _check(q, k, v, mask, causal)
    if _launches(q, k, v, mask):
        from . import kernels

        with torch.cuda.device_of(q):
            return kernels.attention(q, k, v, mask, lowest, listed, scale, causal, most_queries, tiles)
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    kv_heads, group = k.shape[1], q.shape[1] // k.shape[1]
    scores = q.to(wide) @ k.to(wide).repeat_interleave(group, 1).mT * scale
    shown = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device)
    shown = shown.tril() if causal else shown
    if mask is not None:
        shown = _shown(mask, lowest)
        scores = scores if mask.dtype == torch.bool else scores + mask
    shown = shown.expand(scores.shape)
    weights = scores.masked_fill(~shown, -math.inf).softmax(-1)
    weights = torch.where(shown.any(-1, keepdim=True), weights, 0.0)
    held = shown.unflatten(1, (kv_heads, group)).any((2, 3))
    values = torch.where(held[..., None], v, 0.0).to(wide).repeat_interleave(group, 1)
    return _result(q, v).copy_(weights @ values)


def _shown(mask: Tensor, lowest: Tensor | None) -> Tensor:
    """Which keys a mask shows; NaN shows one."""
    return mask if lowest is None else ~(mask <= lowest[..., None])


def _empty_tiles(mask: Tensor, lowest: Tensor | None, kv_heads: int, block_n: int) -> Tensor:
    heads = 1 if mask.shape[1] == 1 else kv_heads
    return mask.new_empty(
        (mask.shape[0], heads, 1 + (mask.shape[3] + block_n - 1) // block_n), dtype=torch.int32
    )


def _empty_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, lowest: Any, listed: Any, scale: float,
    causal: bool, *_: Any,
) -> Tensor:  # fmt: skip
    _check(q, k, v, mask, causal)
    return _result(q, v)


def _result(q: Tensor, v: Tensor) -> Tensor:
    """(B, H, Q, E), whose heads lie beside each other, as projections want them."""
    return q.new_empty((q.shape[0], q.shape[2], q.shape[1], v.shape[3])).transpose(1, 2)


def _flops(q: Any, k: Any, v: Any, *_: Any) -> int:
    """Two for each multiplication and addition of the two products, as if each key were seen."""
    return int(2 * q[0] * q[1] * q[2] * k[2] * (q[3] + v[3]))


DECODE_TILES = define(
    "decode_tiles", _decode_tiles, _empty_tiles, launches=lambda mask, *_: _has_kernel(mask)
)
DECODE_ATTENTION = define(
    "decode_attention", _decode_attention, _empty_attention, flops=_flops, launches=_launches
)
