"""One process of `tests/test_distributed.py`: a small Llama under one of torch's engines.

Prints nothing; raises where a result is not that of one process, or where the ranks differ.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import inductor_fusions
from inductor_fusions import config, fusions, passes
from tests import blocks

COLUMNS = ("attention.q_proj", "attention.k_proj", "attention.v_proj", "mlp.gate_proj", "mlp.up_proj")
ROWS = ("attention.o_proj", "mlp.down_proj")


def tensor_parallel(model: Any, mesh: Any) -> Any:
    plan = {name: ColwiseParallel() for name in COLUMNS} | {name: RowwiseParallel() for name in ROWS}
    for block in model.blocks:
        parallelize_module(block, mesh, plan)
    return model


def wrapped(engine: str, size: int) -> Any:
    """(a compiled model under an engine, whether each rank has samples of its own)."""
    model = blocks.model()
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    model.to(device)
    mesh = init_device_mesh(device, (size,))
    if engine == "ddp":
        return DistributedDataParallel(torch.compile(model)), True
    if engine == "ddp_outside":
        return torch.compile(DistributedDataParallel(model)), True
    if engine == "fsdp":
        for block in model.blocks:
            block.compile()
            fully_shard(block, mesh=mesh)
        return fully_shard(model, mesh=mesh), True
    assert engine == "tp"
    model = tensor_parallel(model, mesh)
    for block in model.blocks:
        block.compile()
    return model, False


def whole(tensor: Any) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def main(engine: str, backend: str) -> None:
    dist.init_process_group(backend)
    rank, size = dist.get_rank(), dist.get_world_size()
    if backend == "nccl":
        torch.cuda.set_device(rank)
    device = f"cuda:{rank}" if backend == "nccl" else "cpu"
    with config.patch(policy="always"):
        model, own_samples = wrapped(engine, size)
        x = blocks.batch(4).to(device)
        mine = x.chunk(size)[rank] if own_samples else x
        out = model(mine)
        out.square().mean().backward()
    fused = inductor_fusions.report().count("fused", "attention")
    failed = inductor_fusions.report().count("failed")

    alone = blocks.model().to(device)
    expected = alone(x)
    expected.square().mean().backward()
    grads = dict(alone.named_parameters())
    expected = expected.chunk(size)[rank] if own_samples else expected
    torch.testing.assert_close(whole(out), expected, rtol=1e-4, atol=1e-5)
    for name, parameter in model.named_parameters():
        name = name.replace("module.", "").replace("_orig_mod.", "")
        assert parameter.grad is not None, name
        torch.testing.assert_close(whole(parameter.grad), grads[name].grad, rtol=1e-4, atol=1e-6, msg=name)

    # Each rank fuses the same, and calls it by the same name.
    said: list[Any] = [None] * size
    sites = [(site.verdict, site.kernel, site.reason) for site in inductor_fusions.report()]
    dist.all_gather_object(said, (passes.FusionPass("pre_grad", fusions.ALL).uuid(), fused, failed, sites))
    assert all(other == said[0] for other in said), said
    assert fused == 2 and failed == 0, inductor_fusions.report()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
