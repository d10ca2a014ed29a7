"""Each of two processes of `test_short.test_sharded`: short attention of DTensors and of whole tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from inductor_fusions import ops
from tests.support.processes import leave

#: Placement of q, k and v, and what is left of it in the result.
PLACEMENTS: dict[str, tuple[Any, Any]] = {
    "batch": (Shard(0), Shard(0)),
    "heads": (Shard(1), Shard(1)),
    "queries": (Shard(2), Replicate()),
    "nothing": (Replicate(), Replicate()),
}


def call(q: Any, k: Any, v: Any, bias: Any, windows: Any, row: Any) -> Any:
    return ops.short_attention(q, k, v, [bias, windows, row])


def inputs(kv_heads: int) -> list[torch.Tensor]:
    """A batch of 8 with 4 heads: a bias of the heads, one of each of two windows, and one of the samples."""
    torch.manual_seed(kv_heads)
    shapes = [
        (8, 4, 6, 16), (8, kv_heads, 5, 16), (8, kv_heads, 5, 16), (1, 4, 6, 5), (2, 1, 6, 5), (8, 1, 1, 5),
    ]  # fmt: skip
    return [torch.randn(shape, dtype=torch.float64).requires_grad_() for shape in shapes]


def compare(mesh: Any, how: str, kv_heads: int, compiled: bool) -> None:
    placement, wanted = PLACEMENTS[how]
    if how == "heads" and kv_heads == 1:
        wanted = Replicate()  # one head is not split
    whole = inputs(kv_heads)
    expected = call(*whole)
    cotangent = torch.randn_like(expected)
    gradients = torch.autograd.grad(expected, whole, cotangent)
    parts = [
        distribute_tensor(x.detach(), mesh, [placement if i < 3 else Replicate()]).requires_grad_()
        for i, x in enumerate(whole)
    ]
    found = (torch.compile(call, dynamic=False) if compiled else call)(*parts)
    assert isinstance(found, DTensor) and found.placements == (wanted,), (how, found.placements)
    ours = torch.autograd.grad(found, parts, distribute_tensor(cotangent, mesh, found.placements))
    for one, other in zip([found, *ours], [expected, *gradients], strict=True):
        torch.testing.assert_close(one.full_tensor(), other, msg=lambda text: f"{how}: {text}")


def main() -> None:
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2,))
    for how in PLACEMENTS:
        compare(mesh, how, 4, compiled=False)
    for kv_heads in (2, 1):
        compare(mesh, "heads", kv_heads, compiled=False)
    compare(mesh, "batch", 4, compiled=True)
    compare(mesh, "heads", 2, compiled=True)
    q, k, v, *masks = inputs(4)
    q, k, v = (distribute_tensor(x.detach(), mesh, [Shard(0)]) for x in (q, k, v))
    with pytest.raises(ValueError, match=r"masks\[0\] of short_attention is not a DTensor"):
        ops.short_attention(q, k, v, masks)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
    leave()
