"""A function compiled as if its tensors were on a CUDA device."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from inductor_fusions._inductor import on_cuda

from .device import DEVICES, pretended
from .interpreter import interpret
from .written import Kernel, Module, write


@dataclass
class Generated:
    """All modules of one compiled function, in the order of their compiles.

    Attributes:
        modules: forward first, then backward.
        outputs: what the function returned on the CPU; None where it was not run.
        grads: gradients of its inputs and parameters that require one, in order; none likewise.
    """

    modules: list[Module] = field(default_factory=list)
    outputs: Any = None
    grads: tuple[torch.Tensor | None, ...] = ()

    @property
    def kernels(self) -> list[Kernel]:
        """The Triton kernels of all modules."""
        return [kernel for module in self.modules for kernel in module.kernels]

    @property
    def forward(self) -> Module:
        """The first forward."""
        return next(module for module in self.modules if not module.is_backward)

    @property
    def backward(self) -> Module:
        """The first backward."""
        return next(module for module in self.modules if module.is_backward)


def generate(
    fn: Callable[..., Any],
    args: Sequence[Any],
    *,
    train: bool = False,
    run: bool = True,
    arch: int = 90,
    dynamic: bool | None = None,
    config: Mapping[str, Any] | None = None,
    prefer: Callable[[str], float] | None = None,
    change: Callable[[fx.Graph], None] | None = None,
    interpreted: bool = False,
) -> Generated:
    """Compile `fn` as if its tensors were on a CUDA device.

    Args:
        fn: a function or a module, on the CPU.
        args: its arguments, CPU tensors among them; those that require a gradient are differentiated.
        train: run a backward, with ones as cotangents. Else nothing requires a gradient.
        run: False only compiles the first graph, and its backward with it. Uncompiled, products of real
            sizes take seconds on a CPU, and flex attention minutes.
        config: Inductor's config inside, such as {"max_autotune": True}.
        prefer: what autotuning would measure: name of a choice -> milliseconds. By default the first
            choice wins.
        change: called with each graph of aten operations before Inductor gets it, to replace what was
            decomposed for the CPU.
        interpreted: compute the outputs and gradients with the generated code, by `interpret`.

    Returns:
        The code of each graph.
    """
    import torch._dynamo
    import torch._functorch.config
    from torch._inductor import compile_fx
    from torch._inductor import config as inductor_config

    found = Generated()
    inner = functools.partial(
        _inner_compile, found, arch, prefer, change, dict(config or {}), run, interpreted
    )
    backend = functools.partial(compile_fx.compile_fx, inner_compile=inner)
    torch._dynamo.reset()
    with (
        # One process: what stands for the device holds in this one alone.
        inductor_config.patch(force_disable_caches=True, compile_threads=1),
        torch._functorch.config.patch(force_non_lazy_backward_lowering=not run),
        torch.enable_grad() if train else torch.no_grad(),
        contextlib.suppress(_CompiledOnlyError),
    ):
        found.outputs = torch.compile(fn, backend=backend, dynamic=dynamic)(*args)
        if train:
            tensors = [t for t in pytree.tree_leaves(found.outputs) if isinstance(t, torch.Tensor)]
            tensors = [t for t in tensors if t.requires_grad]
            leaves = [t for t in pytree.tree_leaves(args) if isinstance(t, torch.Tensor)]
            leaves += list(fn.parameters()) if isinstance(fn, torch.nn.Module) else []
            wanted = [t for t in leaves if t.requires_grad and t.is_leaf]
            ones = [torch.ones_like(t) for t in tensors]
            found.grads = torch.autograd.grad(tensors, wanted, ones, allow_unused=True)
    torch._dynamo.reset()
    return found


class _CompiledOnlyError(BaseException):
    """Raised in place of the first run. An `Exception` would count as a launch that failed."""


def _inner_compile(
    found: Generated,
    arch: int,
    prefer: Callable[[str], float] | None,
    change: Callable[[fx.Graph], None] | None,
    config: dict[str, Any],
    run: bool,
    interpreted: bool,
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    **kwargs: Any,
) -> Any:
    from functorch.compile import make_boxed_func

    moved, inputs = on_cuda(gm, example_inputs)
    if change is not None:
        for module in moved.modules():
            if isinstance(module, fx.GraphModule):
                change(module.graph)
                module.recompile()
    with pretended(DEVICES[arch], prefer), _config_patch(config):
        written = write(moved, inputs, **kwargs)
    found.modules.append(written)
    if not run:
        return make_boxed_func(_stop)
    if interpreted:
        return make_boxed_func(lambda *values: interpret(written, values))
    return make_boxed_func(gm.forward)


def _stop(*values: Any) -> Any:
    raise _CompiledOnlyError


def _config_patch(changes: dict[str, Any]) -> Any:
    from torch._inductor import config

    # Nothing can be run to see whether an epilogue pays.
    return config.patch({"benchmark_epilogue_fusion": False, **changes})
