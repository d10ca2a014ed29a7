"""The fusions that the package ships. A new one is a module here and an entry in `ALL`."""

from __future__ import annotations

from ..fusion import Fusion
from . import (
    attention,
    dot_interaction,
    gated_mlp,
    kernel_defects,
    linear_cross_entropy,
    linear_epilogue,
    lora,
    norm_linear,
    outer_product_linear,
    product_diagonal,
    qkv,
    stock_misfires,
    stored_indices,
)
from .attention import flex_backward

#: Every fusion, in the order in which it is applied within its stage. Stock's patterns cannot
#: misread what attention has fused, so `stock_misfires` follows.
ALL: tuple[Fusion, ...] = (
    attention.FUSION,
    stock_misfires.FUSION,
    outer_product_linear.FUSION,
    dot_interaction.FUSION,
    linear_cross_entropy.FUSION,
    lora.INPUTS,
    stored_indices.FUSION,
    product_diagonal.FUSION,
    flex_backward.FUSION,
    lora.FUSION,
    gated_mlp.FUSION,
    qkv.FUSION,
    linear_epilogue.FUSION,
    norm_linear.FUSION,
    kernel_defects.FUSION,
)
