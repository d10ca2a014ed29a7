"""A problem as a function of torch with its operands."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

Tensors = list[torch.Tensor]


class UnableError(ValueError):
    """A problem that the columns of its table do not determine."""


@dataclass
class Case:
    """A problem as stock and the fusions get it.

    Attributes:
        fn: what a model computes; a list of tensors.
        leaves: those of them that a backward differentiates by; empty in inference.
        fused: the same by the operation of the package, where that is not what the fusions make of `fn`.
        samples: whether the first dim of inputs, outputs and gradients is that of samples, unless it is 1:
            then the first sample alone is compared with float64.
        varied: the section of the kernel whose tiles are worth trying; "" for none.
    """

    fn: Callable[..., Tensors]
    inputs: Tensors
    leaves: Sequence[torch.Tensor] = ()
    fused: Callable[..., Tensors] | None = None
    samples: bool = False
    varied: str = ""

    def __post_init__(self) -> None:
        for leaf in self.leaves:
            leaf.requires_grad_()


def generator(device: str, dtype: torch.dtype) -> Callable[..., torch.Tensor]:
    """Makes tensors of a shape and of numbers from a normal distribution, the same ones each time."""
    source = torch.Generator(device).manual_seed(0)

    def normal(*shape: int, scale: float = 1.0, dtype: torch.dtype = dtype) -> torch.Tensor:
        made = torch.randn(shape, generator=source, device=device, dtype=torch.float32)
        return made.mul_(scale).to(dtype)

    return normal
