"""What the files of this folder share: inputs on either device, checks, and generated kernels."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn

from inductor_fusions import testing
from tests.attention import support as attention
from tests.attention.support import LOWEST
from tests.support.devices import on

#: A backend that runs the passes and then the graph as it is: for the variants of a case that has been
#: compiled in full.
QUICK = testing.EAGER_AFTER_PASSES
CPU = torch.device("cpu")


def check(
    fn: Callable[..., Any], inputs: Sequence[Any] | Mapping[str, Any], device: torch.device, **options: Any
) -> testing.Checked:
    """`testing.check` on a device: one fused attention, with outputs and gradients in the error budget.

    In float32 the budget has two eps: a fused backward computes the weights anew from the logsumexp. It has
    four on a GPU, where the kernels that SDPA brings take `exp2` from the special function unit.
    """
    slack = 1.0
    if options.get("dtype", torch.float32) == torch.float32:
        slack = 4.0 if device.type == "cuda" else 2.0
    fn = on(device, fn) if isinstance(fn, nn.Module) else fn
    return testing.check(fn, on(device, inputs), **{"slack": slack, **options})


def leaf(*shape: int, scale: float = 0.7, grad: bool = True) -> torch.Tensor:
    """A random leaf in float32."""
    return (torch.randn(shape) * scale).requires_grad_(grad)


def qkv(
    q_len: int = 24, kv_len: int | None = None, **options: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries, keys and values: `tests.attention.support.qkv` with keys of the queries' length."""
    return attention.qkv(q_len, kv_len or q_len, **options)


def padding(batch: int, length: int, fill: float = LOWEST) -> torch.Tensor:
    """A padding mask as a bias, (batch, 1, 1, length): the first sample lacks its last four keys."""
    mask = torch.zeros(batch, 1, 1, length)
    mask[0, ..., -4:] = fill
    return mask


def launched(
    fn: Callable[..., Any], args: Sequence[Any], device: torch.device = CPU, **options: Any
) -> tuple[list[str], list[str]]:
    """The Triton kernels and the library calls of a forward on a GPU, which need not be there.

    Args:
        fn, args, options: as in `devtools.cuda_codegen.generate`.
        device: a GPU compiles and runs it; the CPU writes what a GPU would get.

    Returns:
        Names of the kernels that are launched, and of the library calls, each in order.
    """
    module = written(fn, args, device, **options)
    return module.launches, module.extern_calls


def written(fn: Callable[..., Any], args: Sequence[Any], device: torch.device = CPU, **options: Any) -> Any:
    """The code of a forward on a GPU, a `devtools.cuda_codegen.Module`; arguments as in `launched`."""
    from devtools import cuda_codegen

    with torch.set_grad_enabled(options.get("train", False)):
        if device.type == "cpu":
            return cuda_codegen.generate(fn, args, run=False, **options).forward
        from torch._inductor.utils import run_and_get_code

        torch._dynamo.reset()
        # Inductor pads products by timings, which a busy device decides otherwise, and padding adds kernels.
        with torch._inductor.config.patch(force_disable_caches=True, shape_padding=False):
            fn = on(device, copy.deepcopy(fn)) if isinstance(fn, nn.Module) else fn
            _, codes = run_and_get_code(torch.compile(fn, dynamic=False), *on(device, tuple(args)))
        return cuda_codegen.Module(codes[0], fx.Graph(), is_backward=False)


def fused_on(
    device: torch.device, fn: Callable[..., Any], args: Sequence[Any], *, train: bool = False, factor: float
) -> Counter[str]:
    """How many sites of each fusion are fused on a GPU, where outputs and gradients keep the error budget.

    Args:
        device: a GPU compiles and runs it, and stock's error counts; on the CPU the passes take it to be on a
            GPU, their graphs run as they are, and eager mode's error counts.
        fn, args: a function or a module, and its arguments on the CPU.
        factor: an error may be so many times the other.
    """
    if device.type == "cpu":
        from tests.block_mm import support

        sites = support.check(fn, args, train=train, budget=factor).sites
    else:
        sites = check(fn, args, device, fused=None, train=train, factor=factor).sites
    return Counter(site.fusion for site in sites if site.verdict == "fused")
