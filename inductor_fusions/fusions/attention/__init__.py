"""Attention, hand-written or SDPA, to the cheapest kernel that means the same.

`recognise` reads the attention around a softmax into its `normal_form`, `masks` proves what its mask says,
`problem` brings it to (batch, heads, length, dim), `kernels` picks a kernel, `emit` writes it.
"""

from __future__ import annotations

from ...fusion import Fusion
from .sites import candidates

FUSION = Fusion(
    name="attention",
    stage="pre_grad",
    summary="softmax(q @ k^T) @ v and SDPA calls to flash, efficient or cuDNN attention",
    recognise=candidates,
)
