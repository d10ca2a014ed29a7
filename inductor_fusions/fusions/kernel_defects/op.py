"""`inductor_fusions::cudnn_attention_backward`: cuDNN's backward with operands in the layout of its plan.

torch caches the plan of a backward under the sizes and strides of q, k, v and the mask. The strides of the
output and of its gradient are in the plan but not in the key (aten/src/ATen/native/cudnn/MHA.cpp). So here
they are a function of the strides of q: they get q's order, which the forward gives its output too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ... import _inductor
from ...lowering import define

aten = torch.ops.aten

#: Positions of the gradient and of the output in the operation's arguments.
GRADIENT, OUTPUT = 0, 4
_QUERY = 1


def _backward(grad: Tensor, *given: Any) -> Any:
    q, k, v, out, *others, scale = given
    grad, out = (as_laid_out(each, q) for each in (grad, out))
    return aten._scaled_dot_product_cudnn_attention_backward(grad, q, k, v, out, *others, scale=scale)


def _empty(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *others: Any) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


#: The operation that graphs call. It has the arguments of aten's operation; the scale is the last one.
CUDNN_BACKWARD = define(
    "cudnn_attention_backward", _backward, _empty,
    schema="(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor out, Tensor logsumexp, Tensor seed, "
    "Tensor offset, Tensor? bias, Tensor? cum_seq_q, Tensor? cum_seq_k, SymInt max_q, SymInt max_k, "
    "float dropout, bool causal, float? scale) -> (Tensor, Tensor, Tensor)",
)  # fmt: skip


def outer_to_inner(strides: Sequence[int]) -> list[int]:
    """The dims of a tensor from the outermost to the innermost one in memory.

    As the forward lays out its output (alloc_with_matching_layout), where its kernels take it: the last dim
    is the innermost one. Else in their order.
    """
    # Of equal strides, that of the earlier dim is the inner one.
    found = sorted(range(len(strides)), key=lambda dim: (-strides[dim], -dim))
    return found if found[-1] == len(strides) - 1 else list(range(len(strides)))


def as_laid_out(tensor: Tensor, like: Tensor) -> Tensor:
    """The values in dense memory, with the dims in the order of another tensor's strides."""
    order = outer_to_inner(like.stride())
    inverse = [order.index(dim) for dim in range(len(order))]
    return tensor.permute(order).contiguous().permute(inverse)


def _lower(*arguments: Any) -> Any:
    *positional, scale = arguments
    return _inductor.lower_attention_backward(
        aten._scaled_dot_product_cudnn_attention_backward.default,
        positional,
        {"scale": scale},
        like=_QUERY,
        laid_out=(GRADIENT, OUTPUT),
        order=outer_to_inner,
    )


_inductor.register_lowering_when_loaded(CUDNN_BACKWARD, _lower)
