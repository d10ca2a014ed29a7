"""Gates in which channels come first, or tokens are mixed: convolutions, units of spatial gating."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from .linear_form import form

X = (2, 48, 64)


@form((2, 64, 48), (128, 64), (128, 64), (8, 64), (128, 8), reasons=("", "used-elsewhere"), left=(0, 0))
def linears_of_channels(x: Any, w: Any, v: Any, a: Any, b: Any) -> Any:
    """Tokens of a convolution: each linear copies them for itself."""
    x = x.transpose(1, 2)
    return F.silu(F.linear(x, w)) * F.linear(x, v), F.linear(x, v) + F.linear(F.linear(x, a), b)


@form((2, 64, 48), "frozen 64x64", "frozen 64x64", left=(0, 0), reasons=("layout", "layout"))
def frozen_linears_of_channels(x: Any, q: Any, k: Any) -> Any:
    """Without gradients of the weights, each linear is a batch of products."""
    x = x.transpose(1, 2)
    return F.linear(x, q), F.linear(x, k)


@form((2, 64, 6, 8), "frozen 128x64", "frozen 128", left=(0, 0), reasons=("layout", "layout"))
def frozen_linear_of_channels(x: Any, w: Any, c: Any) -> Any:
    return F.gelu(F.linear(x.flatten(2).transpose(1, 2), w, c))


CHANNELS: dict[str, Any] = {"left": (0, 0), "reasons": ("no-matrix", "no-matrix")}


@form((2, 16, 6, 6), (64, 16, 1, 1), (64,), **CHANNELS)
def gate_of_channels(x: Any, w: Any, c: Any) -> Any:
    """U-Nets and conformers."""
    gate, up = F.conv2d(x, w, c).chunk(2, dim=1)
    return F.gelu(gate) * up, F.glu(F.conv2d(x, w), dim=1)


@form((2, 16, 6, 6), (64, 16, 1, 1), (64, 1, 3, 3), **CHANNELS)
def channels_times_each_other(x: Any, w: Any, d: Any) -> Any:
    """NAFNet: no activation."""
    first, second = F.conv2d(F.conv2d(x, w), d, padding=1, groups=64).chunk(2, dim=1)
    return first * second


@form((2, 16, 24), (32, 16, 3), (32, 16, 3), **CHANNELS)
def gate_of_two_convolutions(x: Any, w: Any, v: Any) -> Any:
    """WaveNet."""
    return torch.tanh(F.conv1d(x, w)) * torch.sigmoid(F.conv1d(x, v))


@form((2, 16, 24), (2, 8, 24), (64, 16, 3), (64, 8, 1), **CHANNELS)
def gate_of_a_sum_of_convolutions(x: Any, condition: Any, w: Any, v: Any) -> Any:
    """WaveNet with a condition."""
    first, second = (F.conv1d(x, w, padding=1) + F.conv1d(condition, v)).chunk(2, dim=1)
    return torch.tanh(first) * torch.sigmoid(second)


@form((2, 16, 24), (2, 8, 24), (2, 32, 24), (32, 16, 3), (32, 8, 1))
def sum_of_convolutions_times_a_state(x: Any, condition: Any, state: Any, w: Any, v: Any) -> Any:
    return torch.sigmoid(F.conv1d(x, w, padding=1) + F.conv1d(condition, v)) * torch.tanh(state)


SPATIAL = (X, "frozen 256x64", "frozen 48x48", (48,))


@form(*SPATIAL, reasons=("spatial gating unit", "spatial gating unit"))
def spatial_gating_unit(x: Any, w: Any, s: Any, b: Any) -> Any:
    """A matrix mixes the tokens of one half."""
    u, v = F.gelu(F.linear(x, w)).chunk(2, dim=-1)
    return u * F.linear(F.layer_norm(v, (128,)).mT, s, b).mT


@form(*SPATIAL, left=(1, 1), reasons=("spatial gating unit", "spatial gating unit"))
def spatial_gating_unit_by_einsum(x: Any, w: Any, s: Any, b: Any) -> Any:
    """The bias of each token is added to the product."""
    u, v = F.gelu(F.linear(x, w)).chunk(2, dim=-1)
    return u * (torch.einsum("mn,bnd->bmd", s, F.layer_norm(v, (128,))) + b[:, None])


@form(
    X, "frozen 256x64", "frozen 128x1x7", left=(1, 1), reasons=("spatial gating unit", "spatial gating unit")
)
def convolutional_gating_unit(x: Any, w: Any, k: Any) -> Any:
    """Of a Branchformer: a convolution along the tokens of one half."""
    r, g = F.linear(x, w).chunk(2, dim=-1)
    return r * F.conv1d(g.mT, k, padding=3, groups=128).mT


@form(
    X, "frozen 256x64", "frozen 128x1x7", "frozen 128x1", left=(1, 1),
    reasons=("spatial gating unit", "spatial gating unit"),
)  # fmt: skip
def gate_beside_a_scaled_convolution(x: Any, w: Any, k: Any, d: Any) -> Any:
    """Of a Mamba: both halves of one linear, of which a convolution reads one."""
    r, g = F.linear(x, w).mT.chunk(2, 1)
    return F.silu(F.conv1d(r, k, padding=3, groups=128)) * d * F.silu(g)
