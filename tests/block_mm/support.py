"""Runs the passes on graphs that seem to be on CUDA, and the fused graphs on the CPU."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import pytest
import torch
import torch._inductor.config
from torch import fx, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.utils import _pytree as pytree

pytest.importorskip("triton")

from devtools import cuda_codegen
from inductor_fusions import config, fusions, reporting
from inductor_fusions.block_mm.op import BLOCK_MM
from inductor_fusions.checking.budget import FACTOR, Values, compare, problems
from inductor_fusions.driver import passes

POST_GRAD = tuple(fusion for fusion in fusions.ALL if fusion.stage == "post_grad")


@dataclass
class Run:
    """What the passes made of a function, and what that computes.

    Attributes:
        graphs: the graphs after the passes, forward first.
        sites: what was reported, in order.
        outputs, grads: results of the graphs after the passes.
        inputs: the differentiated inputs and parameters.
    """

    graphs: list[fx.Graph] = field(default_factory=list)
    sites: list[reporting.Site] = field(default_factory=list)
    outputs: list[torch.Tensor] = field(default_factory=list)
    grads: list[torch.Tensor | None] = field(default_factory=list)

    def calls(self, graph: int = 0) -> list[fx.Node]:
        """The block_mm calls of one graph."""
        return [node for node in self.graphs[graph].nodes if node.target is BLOCK_MM]

    def products(self, graph: int = 0) -> int:
        """Number of products that were left in a graph."""
        aten = torch.ops.aten
        return sum(node.target in (aten.mm.default, aten.addmm.default) for node in self.graphs[graph].nodes)

    def reasons(self, fusion: str) -> list[str]:
        """Why sites of a fusion were not fused."""
        return [s.reason for s in self.sites if s.fusion == fusion and s.verdict != "fused"]

    def codes(self, fusion: str) -> list[str]:
        """The codes of those reasons."""
        return [s.code for s in self.sites if s.fusion == fusion and s.verdict != "fused"]

    def fused(self, fusion: str) -> int:
        """Number of fused sites of a fusion."""
        return sum(s.fusion == fusion and s.verdict == "fused" for s in self.sites)


def run(
    fn: Callable[..., Any],
    args: Sequence[Any],
    *,
    train: bool = False,
    dynamic: bool | None = None,
    arch: int = 90,
    policy: str = "always",
    inductor: dict[str, Any] | None = None,
    strict: bool = True,
) -> Run:
    """Compile `fn` with the post-grad fusions, on what seems to be a CUDA device, and run the result.

    Every graph is checked for topological order. Nothing is lowered: `block_mm` runs as it does in eager
    mode.

    Args:
        fn: a function or a module, on the CPU.
        train: differentiate it, with random cotangents.
        arch: the architecture of the device.
        inductor: Inductor's config while the passes run.
    """
    import torch._dynamo
    from torch._inductor import config as inductor_config

    found = Run()
    backend = as_on_a_gpu(found, arch, inductor)
    torch._dynamo.reset()
    with (
        config.patch(policy=policy, strict=strict),
        reporting.isolated() as sites,
        inductor_config.patch(force_disable_caches=True),
        torch.set_grad_enabled(train),
    ):
        outputs = torch.compile(fn, backend=backend, dynamic=dynamic)(*args)
        found.outputs = [t for t in pytree.tree_leaves(outputs) if isinstance(t, torch.Tensor)]
        if train:
            found.grads = differentiate(fn, args, found.outputs)
    found.sites = list(sites)
    torch._dynamo.reset()
    return found


def as_on_a_gpu(found: Run, arch: int = 90, inductor: dict[str, Any] | None = None) -> Callable[..., Any]:
    """A backend of `torch.compile` that runs what the passes make of a graph for a CUDA device.

    Args:
        arch, inductor: as in `run`.
    """
    from torch._inductor import compile_fx
    from torch._inductor.fx_passes import joint_graph

    inner = functools.partial(_fuse, found, arch, inductor or {})

    def backend(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        with mock.patch.object(joint_graph, "get_gpu_type", lambda: "cpu"):  # `mm` of an einsum's `bmm`
            compiled: Callable[..., Any] = compile_fx.compile_fx(gm, example_inputs, inner_compile=inner)
        return compiled

    return backend


def differentiate(
    fn: Callable[..., Any], args: Sequence[Any], outputs: Sequence[torch.Tensor]
) -> list[torch.Tensor | None]:
    """Gradients of the outputs, with cotangents that depend on nothing but their position and shape."""
    leaves = [t for t in pytree.tree_leaves(args) if isinstance(t, torch.Tensor) and t.requires_grad]
    leaves += [p for p in fn.parameters() if p.requires_grad] if isinstance(fn, nn.Module) else []
    wanted = [t for t in outputs if t.requires_grad]
    return list(torch.autograd.grad(wanted, leaves, cotangents(wanted), allow_unused=True))


def cotangents(outputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """One for each output that requires a gradient."""
    found = []
    for index, t in enumerate(t for t in outputs if t.requires_grad):
        generator = torch.Generator().manual_seed(index)
        found.append(torch.randn(t.shape, dtype=torch.float64, generator=generator).to(t.dtype))
    return found


def _fuse(
    found: Run,
    arch: int,
    inductor: dict[str, Any],
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    **_: Any,
) -> Callable[..., Any]:
    from functorch.compile import make_boxed_func
    from torch._inductor import config as inductor_config

    with cuda_codegen.pretended(cuda_codegen.DEVICES[arch]), inductor_config.patch(inductor):
        moved, _ = cuda_codegen.on_cuda(gm, example_inputs)
        for fusion in POST_GRAD:
            if config.is_on(fusion.name):
                passes.apply(fusion, moved.graph)
    moved.graph.lint()
    found.graphs.append(moved.graph)
    with unset_fake_temporarily():  # constants of the graph are real
        runnable = copy.deepcopy(moved)
    for node in runnable.graph.nodes:
        node.args = pytree.tree_map(_on_cpu, node.args)
        node.kwargs = pytree.tree_map(_on_cpu, node.kwargs)
    runnable.recompile()
    return make_boxed_func(runnable.forward)


def _on_cpu(argument: Any) -> Any:
    return torch.device("cpu") if isinstance(argument, torch.device) else argument


def check(
    fn: Callable[..., Any],
    args: Sequence[Any],
    *,
    train: bool = False,
    budget: float = FACTOR,
    **options: Any,
) -> Run:
    """`run`, and assert that every output and gradient is about as exact as that of eager mode.

    The error budget is that of `testing.check` with a factor of `budget`, relative to eager mode; dtypes and
    strides must be those of eager mode.
    """
    fused = run(fn, args, train=train, **options)
    with torch.set_grad_enabled(train):
        stock = _leaves(fn(*args))
        wide = copy.deepcopy(fn).double() if isinstance(fn, nn.Module) else fn
        wide_args = pytree.tree_map_only(torch.Tensor, _double, tuple(args))
        exact = _leaves(wide(*wide_args))
        grads: list[list[torch.Tensor | None]] = [fused.grads, [], []]
        if train:
            grads[1:] = differentiate(fn, args, stock), differentiate(wide, wide_args, exact)
    for i, (x, y) in enumerate(zip(fused.outputs, stock, strict=True)):
        assert x.stride() == y.stride(), f"output {i}: strides {x.stride()}, of eager mode {y.stride()}"
    for i, (x, y) in enumerate(zip(*grads[:2], strict=True)):
        assert x is y is None or (x.dtype == y.dtype and x.shape == y.shape), f"gradient {i}"
    named = [{str(i): x for i, x in enumerate(each)} for each in grads]
    runs = map(Values, (fused.outputs, stock, exact), named)
    found = problems(compare(*runs, factor=budget))
    assert not found, found
    return fused


def _leaves(outputs: Any) -> list[torch.Tensor]:
    return [t for t in pytree.tree_leaves(outputs) if isinstance(t, torch.Tensor)]


def _double(t: torch.Tensor) -> torch.Tensor:
    return t.detach().double().requires_grad_(t.requires_grad) if t.is_floating_point() else t


def rand(*shape: int, dtype: torch.dtype = torch.bfloat16, grad: bool = True) -> torch.Tensor:
    """A random leaf."""
    return torch.randn(shape).to(dtype).requires_grad_(grad)


class Linears(nn.Module):
    """Linears on one input.

    Args:
        bias: whether each has a bias; one for all, or one for each.
    """

    def __init__(self, width: int, outs: Sequence[int], bias: bool | Sequence[bool] = False) -> None:
        super().__init__()
        has = [bias] * len(outs) if isinstance(bias, bool) else bias
        self.parts = nn.ModuleList(nn.Linear(width, n, bias=b) for n, b in zip(outs, has, strict=True))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(part(x) for part in self.parts)


class GatedMLP(nn.Module):
    """act(gate(x)) * up(x), then down."""

    def __init__(
        self, act: Callable[[Any], Any], bias: bool = False, width: int = 64, hidden: int = 128
    ) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(width, hidden, bias=bias) for _ in range(2))
        self.down, self.act = nn.Linear(hidden, width, bias=bias), act

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.act(self.gate(x)) * self.up(x))
