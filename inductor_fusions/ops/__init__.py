"""Operations of the package, for direct use: `inductor_fusions.ops.block_mm`, `short_attention`.

The fusions emit them; your code may call them too, in eager mode and under `torch.compile`.
"""

from __future__ import annotations

from .block_mm import block_mm
from .short_attention import short_attention

__all__ = ["block_mm", "short_attention"]
