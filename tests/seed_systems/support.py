"""What the files of this folder share: inputs on either device, checks, and generated kernels."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from inductor_fusions import testing

#: A backend that runs the passes and then the graph as it is: for the variants of a case that has been
#: compiled in full.
QUICK = testing.EAGER_AFTER_PASSES
LOWEST = torch.finfo(torch.float32).min


def on(device: torch.device, value: Any) -> Any:
    """Modules, and tensors in any structure, moved to a device; leaves stay leaves."""

    def move(t: torch.Tensor) -> torch.Tensor:
        return t.detach().to(device).requires_grad_(t.requires_grad)

    return (
        value.to(device) if isinstance(value, nn.Module) else pytree.tree_map_only(torch.Tensor, move, value)
    )


def check(
    fn: Callable[..., Any],
    inputs: Sequence[Any] | Mapping[str, Any],
    device: torch.device,
    **options: Any,
) -> testing.Checked:
    """`testing.check` on a device: one fused attention, with outputs and gradients in the error budget.

    In float32 the budget has two eps: a fused backward computes the weights anew from the logsumexp.
    """
    wide = options.get("dtype", torch.float32) == torch.float32
    fn = on(device, fn) if isinstance(fn, nn.Module) else fn
    return testing.check(fn, on(device, inputs), **{"slack": 2.0 if wide else 1.0, **options})


def leaf(*shape: int, scale: float = 0.7, grad: bool = True) -> torch.Tensor:
    """A random leaf in float32."""
    return (torch.randn(shape) * scale).requires_grad_(grad)


def qkv(
    q_len: int = 24,
    kv_len: int | None = None,
    *,
    batch: int = 2,
    heads: int = 3,
    dim: int = 16,
    grad: bool = True,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries, keys and values of shape (batch, heads, length, dim)."""
    lengths = (q_len, kv_len or q_len, kv_len or q_len)
    q, k, v = (leaf(batch, heads, length, dim, grad=grad) for length in lengths)
    return q, k, v


def padding(batch: int, length: int, fill: float = LOWEST) -> torch.Tensor:
    """A padding mask as a bias, (batch, 1, 1, length): the first sample lacks its last four keys."""
    mask = torch.zeros(batch, 1, 1, length)
    mask[0, ..., -4:] = fill
    return mask


def launched(fn: Callable[..., Any], args: Sequence[Any], **options: Any) -> tuple[list[str], list[str]]:
    """The Triton kernels and the library calls of a forward on a GPU, which need not be there.

    Args:
        fn, args, options: as in `bench.cuda_codegen.generate`.

    Returns:
        Names of the kernels that are launched, and of the library calls, each in order.
    """
    from bench import cuda_codegen

    with torch.set_grad_enabled(options.get("train", False)):
        module = cuda_codegen.generate(fn, args, **options).forward
    return module.launches, module.extern_calls
