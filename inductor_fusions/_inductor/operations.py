"""Operations of torch that have no public name."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd import graph as autograd_graph

#: What `torch.nn.functional.grouped_mm` calls; None on a torch that is too old for it.
GROUPED_MM: Any = getattr(torch, "_grouped_mm", None)
_CUDA_BACKENDS = ("efficient", "flash", "cudnn")


def assert_on_device(condition: torch.Tensor, message: str) -> None:
    """Raise where a condition does not hold: at once on a CPU, by an assert of the device elsewhere."""
    torch._assert_async(condition, message)


def gradients_in_modes(
    outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], cotangents: Sequence[torch.Tensor]
) -> tuple[torch.Tensor | None, ...]:
    """`torch.autograd.grad`, but with torch function modes in what the backward runs again (checkpoints).

    `grad` is handed to the modes itself, and a mode is off while it handles a function.
    """
    run: Any = autograd_graph._engine_run_backward
    found = run(tuple(outputs), tuple(cotangents), False, False, tuple(inputs), True, accumulate_grad=False)
    return tuple(found)


def sdpa_is_fused(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Any, dropout: float, causal: bool, grouped: bool
) -> bool:
    """Whether SDPA takes a fused kernel for these arguments, and not the products one by one.

    False as well where it may take neither.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return bool(torch._fused_sdp_choice(q, k, v, mask, dropout, causal, enable_gqa=grouped) != 0)
        except RuntimeError:
            return False


def cuda_sdpa_backends(params: Any) -> frozenset[str] | None:
    """Which of "efficient", "flash" and "cudnn" support arguments of SDPA on a CUDA device.

    None if sizes that depend on data decide it: the call itself may raise then, as in torch 2.11.
    """
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

    supports = {name: getattr(torch.backends.cuda, f"can_use_{name}_attention") for name in _CUDA_BACKENDS}
    try:
        return frozenset(name for name, asked in supports.items() if asked(params))
    except GuardOnDataDependentSymNode:
        return None
