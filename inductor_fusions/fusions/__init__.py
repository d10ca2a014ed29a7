"""The fusions that the package ships. A new one is a module here and an entry in `ALL`."""

from __future__ import annotations

from ..fusion import Fusion
from . import attention, gated_mlp, linear_epilogue, qkv

#: Every fusion, in the order in which it is applied within its stage.
ALL: tuple[Fusion, ...] = (attention.FUSION, gated_mlp.FUSION, qkv.FUSION, linear_epilogue.FUSION)
