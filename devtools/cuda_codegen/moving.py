"""Graphs of aten operations, copied to the device that does not exist."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from inductor_fusions import _inductor


@_inductor.device_guard()
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
            _rewrite_devices(module)
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


def _rewrite_devices(module: fx.GraphModule) -> None:
    def one(argument: Any) -> Any:
        return torch.device("cuda", 0) if isinstance(argument, torch.device) else argument

    for node in module.graph.nodes:
        node.args = pytree.tree_map(one, node.args)
        node.kwargs = pytree.tree_map(one, node.kwargs)
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
