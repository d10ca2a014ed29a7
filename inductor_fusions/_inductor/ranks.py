"""Agreement between ranks: if one rank recompiles a graph, all have to."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import fx

from .shapes import value_of

#: Operations of these libraries run on one process alone. What a library of somebody else does is not known.
_ALONE = frozenset(
    "aten prims prim rngprims profiler inductor inductor_fusions quantized mkldnn torchvision".split()
)
_TOGETHER = "torch.distributed"

#: Settings with which a compile asks other processes, or moves and joins collectives by what else is in the
#: graph: (module, path, the value that switches it off, where it is not false).
_AGREED = (
    ("torch._functorch.config", "_sync_decision_cross_ranks", None),
    ("torch._inductor.config", "distributed_max_autotune_gemm", None),
    ("torch._inductor.config", "reorder_for_compute_comm_overlap", None),
    ("torch._inductor.config", "bucket_all_gathers_fx", "none"),
    ("torch._inductor.config", "bucket_reduce_scatters_fx", "none"),
    ("torch._inductor.config", "bucket_all_reduces_fx", "none"),
    ("torch._inductor.config", "_micro_pipeline_tp", None),
    ("torch._inductor.config", "_fuse_ddp_communication", None),
    ("torch._inductor.config", "aten_distributed_optimizations.enable_overlap_scheduling", None),
    ("torch._inductor.config", "aten_distributed_optimizations.collective_bucketing", None),
    ("torch._inductor.config", "aten_distributed_optimizations.spmd_check", None),
)


def has_peers() -> bool:
    """Whether this process is one of several that work together."""
    distributed = torch.distributed
    return distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1


def first_to_say(key: str, value: str) -> str:
    """The `value` of the process of a job that called this first. No process waits.

    Raises:
        RuntimeError: the processes have no store, or it does not answer.
    """
    distributed: Any = importlib.import_module("torch.distributed.distributed_c10d")
    found: bytes = distributed._get_default_store().compare_set(key, "", value)
    return found.decode()


def communicates(model: fx.GraphModule) -> bool:
    """Whether a graph, or a body in it, may wait for other processes.

    Collectives do, and operations on tensors that lie on several processes; those of other libraries may.
    """
    if not has_peers():
        return False
    graphs = [each.graph for each in model.modules() if isinstance(each, fx.GraphModule)]
    return any(_node_communicates(node) for graph in graphs for node in graph.nodes)


def _node_communicates(node: fx.Node) -> bool:
    value = value_of(node)
    if type(value).__module__.startswith(_TOGETHER):
        return True
    # Operations with effects, or that write to their arguments, are called by another one.
    called = [node.target, *node.args] if node.op == "call_function" else []
    return any(_calls_others(each) for each in called)


def _calls_others(target: Any) -> bool:
    if isinstance(target, torch._ops.HigherOrderOperator):
        return False
    if isinstance(target, torch._ops.OpOverload):
        return target.namespace not in _ALONE
    if isinstance(target, torch._ops.OpOverloadPacket):
        return target._qualified_op_name.partition("::")[0] not in _ALONE
    return callable(target) and (getattr(target, "__module__", None) or "").startswith(_TOGETHER)


def compiles_together() -> bool:
    """Whether compiling a graph with collectives depends on what other processes compile."""
    for module, path, off in _AGREED:
        value: Any = importlib.import_module(module)
        for name in path.split("."):
            value = getattr(value, name, None)
        if value and value != off:
            return True
    return False
