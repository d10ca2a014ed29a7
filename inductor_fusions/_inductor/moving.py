"""Graphs that are copied to another device, which need not be in this machine."""

from __future__ import annotations

import contextlib
import copy
import importlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
from torch import fx
from torch.utils import _pytree as pytree

from .absent import device_guard
from .shapes import is_wrapper


@device_guard()
def on_cuda(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> tuple[fx.GraphModule, list[Any]]:
    """A copy of a graph with everything on a device ("cuda:0"), and fake inputs for it."""
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

    values = [n.meta.get("val") for n in gm.graph.nodes]
    leaves = [v for v in [*pytree.tree_leaves(values), *example_inputs] if isinstance(v, FakeTensor)]
    mode = leaves[0].fake_mode if leaves else FakeTensorMode()

    def move(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        device = "cpu" if value.dim() == 0 and not isinstance(value, FakeTensor) else "cuda:0"
        with mode:
            return torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device=device)

    moved = copied(gm)
    for module in moved.modules():
        if isinstance(module, fx.GraphModule):
            _rewrite_devices(module, torch.device("cuda", 0))
            for node in module.graph.nodes if module is not moved else ():  # the body of an operation
                if "val" in node.meta:
                    node.meta["val"] = pytree.tree_map(move, node.meta["val"])
    placeholders = [node for node in gm.graph.nodes if node.op == "placeholder"]
    inputs = [
        move(node.meta.get("val", given)) for node, given in zip(placeholders, example_inputs, strict=True)
    ]
    _propagate(moved, mode, inputs)
    return moved, inputs


def copied(gm: fx.GraphModule) -> fx.GraphModule:
    """A copy of a graph and of those inside it, with the same tensors.

    They are only looked at, and a deep copy of a fake loses its mode."""
    held = [*gm.parameters(), *gm.buffers()]
    held += [t for module in gm.modules() for t in vars(module).values() if isinstance(t, torch.Tensor)]
    moved: fx.GraphModule = copy.deepcopy(gm, {id(t): t for t in held})
    return moved


def _rewrite_devices(module: fx.GraphModule, device: torch.device) -> None:
    """Every device that is named in a graph is another one from now on."""

    def one(argument: Any) -> Any:
        if isinstance(argument, torch.device):
            return device
        return device.type if argument in ("cuda", "cuda:0") else argument

    for node in module.graph.nodes:
        node.args = pytree.tree_map(one, node.args)
        node.kwargs = pytree.tree_map(one, node.kwargs)
        if node.op == "call_method" and node.target == "cuda":  # `x.cuda()`, perhaps with a number
            node.target, node.args, node.kwargs = "to", (node.args[0], device), {}
    module.recompile()


def _propagate(module: fx.GraphModule, mode: Any, inputs: Sequence[Any]) -> None:
    from torch.fx.passes.fake_tensor_prop import FakeTensorProp

    def move(value: Any) -> Any:
        with mode:
            return torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device="cuda:0")

    class Prop(FakeTensorProp):
        def fetch_attr(self, target: str) -> Any:
            value = super().fetch_attr(target)
            if not isinstance(value, torch.Tensor):
                return value
            return move(value)

    Prop(module, mode=mode).propagate_dont_convert_inputs(*inputs)


@contextlib.contextmanager
def autograd_on_cpu() -> Iterator[None]:
    """Inside, AOTAutograd traces graphs of CUDA tensors as graphs of CPU tensors.

    A backward that is traced on CUDA tensors needs a device, also for fake ones: torch's engine asks for its
    streams. Passes before autograd see the CUDA tensors; those on the joint graph take the CPU for the GPU,
    and make `mm` of an einsum's `bmm`. Source: `aot_autograd` of torch/_dynamo/backends/common.py, how
    torch/_inductor/compile_fx.py calls it, and `bmm_to_mm` of torch/_inductor/fx_passes/joint_graph.py.
    """
    from torch._inductor.fx_passes import joint_graph

    common: Any = importlib.import_module("torch._dynamo.backends.common")
    compile_fx: Any = importlib.import_module("torch._inductor.compile_fx")
    original = common.aot_autograd

    def aot_autograd(pre_grad_passes: Callable[..., Any] | None = None, **options: Any) -> Callable[..., Any]:
        traced = original(**options)

        def call(graph: fx.GraphModule, inputs: Sequence[Any]) -> Any:
            if pre_grad_passes is not None:  # older versions run them before
                graph = pre_grad_passes(graph, inputs)
            moved = copied(graph)
            for module in moved.modules():
                if isinstance(module, fx.GraphModule):
                    _rewrite_devices(module, torch.device("cpu"))
            return traced(moved, [_moved_to_cpu(value) for value in inputs])

        return call

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(joint_graph, "get_gpu_type", lambda: "cpu"))
        for module in (common, compile_fx):
            if hasattr(module, "aot_autograd"):
                stack.enter_context(mock.patch.object(module, "aot_autograd", aot_autograd))
        yield


@contextlib.contextmanager
def gradients_without_device() -> Iterator[None]:
    """Inside, gradients of CUDA tensors are zeros, without a backward.

    Dynamo runs what a function differentiates by itself (`torch.func.grad`) with fake tensors of its device.
    It wants sizes and dtypes, and whether a gradient is batched or may be differentiated again. Source:
    `grad` of torch/autograd/__init__.py.
    """
    run = vars(torch.autograd)["_engine_run_backward"]

    def call(outputs: Any, *args: Any, **options: Any) -> Any:
        cotangents, _, create_graph, inputs, _ = args
        if not any(tensor.device.type == "cuda" for tensor in inputs):
            return run(outputs, *args, **options)
        with torch.set_grad_enabled(create_graph):
            zero = sum((0 * out * d_out).sum() for out, d_out in zip(outputs, cotangents, strict=True))
            return tuple((torch.zeros_like(tensor) + zero).to(tensor.dtype) for tensor in inputs)

    with mock.patch.object(torch.autograd, "_engine_run_backward", call):
        yield


def _moved_to_cpu(value: Any) -> Any:
    from torch._guards import TracingContext
    from torch._subclasses.fake_tensor import FakeTensor

    if not isinstance(value, torch.Tensor):
        return value
    with torch.no_grad():
        if is_wrapper(value):
            made = value.to("cpu")
        elif isinstance(value, FakeTensor):
            with value.fake_mode:
                made = torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device="cpu")
                # An input of the graph may be a part of a tensor: its offset may be a symbol that is known.
                whole, offset = made.untyped_storage(), value.storage_offset()
                made = made.new_empty(0).set_(whole, offset, value.size(), value.stride())
        else:
            return value
    context = TracingContext.try_get()
    if context is not None and value in context.tensor_to_context:  # which of its sizes are symbolic
        context.tensor_to_context[made] = context.tensor_to_context[value]
    return made.requires_grad_(value.requires_grad)
