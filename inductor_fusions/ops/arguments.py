"""Checks of arguments that the schemas of the operations cannot make."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def check_tensors(name: str, found: object, or_none: bool = False) -> None:
    """Refuse an argument that is no list of tensors, such as a tensor, whose rows would be taken for them."""
    kinds = "tensors or None" if or_none else "tensors"
    if not isinstance(found, (list, tuple)):
        raise TypeError(f"{name} must be a list of {kinds}, not a {type(found).__name__}")
    for i, element in enumerate(found):
        if not isinstance(element, torch.Tensor) and not (or_none and element is None):
            raise TypeError(f"{name} must be a list of {kinds}; element {i} is a {type(element).__name__}")


def check_one_device(name: str, tensors: Sequence[torch.Tensor]) -> None:
    """Refuse tensors of several devices: an eager product of CPU and meta returns uninitialised memory."""
    for tensor in tensors:
        if tensor.device != tensors[0].device:
            raise ValueError(
                f"the tensors of {name} must be on one device, not on {tensors[0].device} and {tensor.device}"
            )
