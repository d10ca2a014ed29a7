"""Attention on DTensors: batch and heads may be sharded, everything else is gathered first.

Each rank computes its own samples and heads with no communication. It is a function around the operation, not
a sharding rule: torch's rules (`torch.distributed.tensor.experimental.register_sharding`) do not support the
operation's lists of masks and of gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

BATCH, HEADS = 0, 1


def attention(
    compute: Callable[..., torch.Tensor],
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    masks: Sequence[torch.Tensor],
) -> torch.Tensor:
    """`compute(q, k, v, masks)` on the local parts of DTensors.

    Args:
        compute: takes and gives plain tensors, (batch, heads, length, dim).
        q: a DTensor. It decides: where it is sharded over the batch or the heads, so is all the rest, and the
            result; any other placement is replicated first.
        k, v: DTensors on the mesh of q.
        masks: the same; those of size 1 in the dim that is sharded are whole on each rank, and those that
            repeat after some samples are repeated for the whole batch.

    Raises:
        ValueError: an argument is no DTensor, or one on another mesh.
    """
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

    named: dict[str, Any] = {"q": q, "k": k, "v": v}
    named |= {f"masks[{i}]": mask for i, mask in enumerate(masks)}
    for name, tensor in named.items():
        if not isinstance(tensor, DTensor):
            raise ValueError(f"{name} of short_attention is not a DTensor, but other operands are")
        if tensor.device_mesh != named["q"].device_mesh:
            raise ValueError(f"{name} of short_attention is on another mesh than q")
    mesh = named["q"].device_mesh
    dims: list[int | None] = []
    for i, placement in enumerate(named["q"].placements):
        dim = placement.dim if isinstance(placement, Shard) else None
        # Shares of unequal size would not agree with those of k and v, whose heads may be fewer.
        if dim is None or dim > HEADS or dim in dims or any(t.shape[dim] % mesh.size(i) for t in (q, k, v)):
            dim = None
        dims.append(dim)

    def local(tensor: Any) -> torch.Tensor:
        placements: list[Any] = []
        grads: list[Any] = []
        for dim in dims:
            split = dim is not None and tensor.shape[dim] > 1
            placements.append(Shard(dim) if split else Replicate())  # type: ignore[arg-type]
            # What is whole on each rank meets a part of the samples or heads there: its gradients are summed.
            grads.append(Partial() if dim is not None and not split else placements[-1])
        found: torch.Tensor = tensor.redistribute(mesh, placements).to_local(grad_placements=grads)
        return found

    if BATCH in dims:
        masks = [
            m if m.shape[0] in (1, q.shape[0]) else m.repeat(q.shape[0] // m.shape[0], 1, 1, 1) for m in masks
        ]
    result = compute(local(q), local(k), local(v), [local(mask) for mask in masks])
    return DTensor.from_local(
        result, mesh, [Replicate() if dim is None else Shard(dim) for dim in dims], run_check=False
    )
