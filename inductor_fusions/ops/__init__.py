"""Operations of the package, for direct use: `inductor_fusions.ops.block_mm`.

The fusions put them into graphs; code of yours may call them as well, in eager mode and under
`torch.compile`.
"""

from __future__ import annotations

from .block_mm import block_mm

__all__ = ["block_mm"]
