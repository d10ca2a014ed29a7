"""Causal attention with one row of biases for all queries: cuDNN's kernel takes both at once.

SDPA takes either a mask or `is_causal`. So padding, or ALiBi, beside a causal mask needs a bias of (batch,
heads, q_len, kv_len), and work on keys that no query sees. The operation behind SDPA takes a bias with
`is_causal`, and expands one that has a single query (ATen/native/transformers/cuda/attention.cu). So the part
of a mask that is not causal becomes a bias of (batch, heads, 1, kv_len).

A number that is added to all scores of a query does not change the softmax, so slope * (key - query) could be
written as slope * key. That is not done: the bias has the dtype of q, in which slope * key has lost the
digits in which neighbouring keys differ. Flex attention computes such a bias in float32.
"""

from __future__ import annotations

import math
import operator
from typing import Any

import torch
from torch import fx

from ..._inductor import cuda_sdpa_backends, known_true
from ...graph import torch_ops
from ...graph.builder import Builder
from . import predicates
from .masks import Bool, conjunction, dims, is_causal
from .normal_form import Term
from .operands import Operand
from .problem import Problem
from .structure import BATCH, KEY

#: Devices that have the kernel.
DEVICES = frozenset({"cuda"})
#: What hides a key: exp(it) is 0 beside any score, and it is small enough for a row of nothing else to stay
#: finite, where the rounding of its logsumexp is multiplied by log2(e) and goes through exp2.
HIDDEN = {torch.bfloat16: -(2.0**20), torch.float16: -6e4}
#: Rows of keys are laid out at multiples of so many elements.
ALIGNMENT = 8


def refused(problem: Problem) -> str:
    """Why the kernel does not take a problem; empty where it does."""
    structure = problem.structure
    if structure is None or structure.visible is True or problem.causal:
        return "its mask is not a causal mask combined with another"
    if problem.stages or problem.sink is not None:
        return "cuDNN supports no functions of the scores"
    if not any(is_causal(part) for part in structure.conjuncts):
        return "its mask is not causal"
    if not all(is_causal(part) or dims(part) <= {BATCH, KEY} for part in structure.conjuncts):
        return "its other mask varies over queries"
    if not structure.biases and len(structure.conjuncts) == 1:
        return "its mask is only causal"
    if problem.q.value.device.type not in DEVICES or problem.dtype not in HIDDEN:
        return f"cuDNN has no kernel for {problem.dtype} on {problem.q.value.device.type}"
    q_len, kv_len = problem.q.shape[2], problem.k.shape[2]
    if not known_true(q_len == kv_len) or not known_true(kv_len % ALIGNMENT == 0):
        return f"its length is not known to be a multiple of {ALIGNMENT}"
    if problem.dropout > 0:
        return "it has dropout"
    if problem.scale is not None and not (isinstance(problem.scale, (int, float)) and problem.scale > 0):
        return "its scale is not a positive constant"
    if problem.train and torch.are_deterministic_algorithms_enabled():
        return "its backward is not deterministic"
    if len(structure.biases) > 1:
        return "it has several biases, whose sum would be rounded"
    return _refused_bias(problem, *structure.biases[0]) if structure.biases else ""


def _refused_bias(problem: Problem, term: Term, operand: Operand) -> str:
    tensor = torch_ops.tensor(term.node)
    if not known_true(operand.shape[-2] == 1):
        return "its bias varies over queries"
    if tensor is None or (problem.train and tensor.requires_grad):
        return "its bias requires a gradient, which cuDNN does not compute"
    if tensor.dtype != problem.dtype or abs(math.frexp(term.factor)[0]) != 0.5:
        return f"its bias would be rounded to {problem.dtype}"
    return ""


def takes(problem: Problem, grouped: bool) -> bool:
    """Whether cuDNN has a kernel for the tensors of a problem that is not refused.

    Args:
        grouped: whether k and v keep their own heads.
    """
    if problem.q.value.device.type != "cuda":
        return True  # DEVICES holds another one: a test
    q = problem.q.value.to(problem.dtype)
    k, v = (problem.k, problem.v) if grouped else (problem.full_k, problem.full_v)
    k_value, v_value = (t.value.to(problem.dtype) for t in (k, v))
    params = torch.backends.cuda.SDPAParams(q, k_value, v_value, None, 0.0, True, grouped)
    return torch.backends.cuda.cudnn_sdp_enabled() and "cudnn" in (cuda_sdpa_backends(params) or ())


def bias(build: Builder, problem: Problem) -> fx.Node:
    """The bias, as (batch, heads, 1, kv_len) in the dtype of the kernel."""
    structure = problem.structure
    assert structure is not None
    shape = (*problem.q.shape[:3], problem.k.shape[2])
    parts: list[Bool] = [part for part in structure.conjuncts if not is_causal(part)]
    base: Any = 0.0
    for term, operand in structure.biases:
        base = operand.built(build)
        if term.factor != 1.0:
            base = build.call(torch.mul, base, term.factor)
    row: fx.Node = base
    if parts:
        seen = predicates.whole(build, conjunction(parts), shape, problem.q.value.device)
        row = build.call(torch.where, seen, base, HIDDEN[problem.dtype])
    row = build.call("expand", build.to(row, problem.dtype), (*shape[:2], 1, shape[3]))
    row = build.call("contiguous", row)
    if all(isinstance(size, int) for size in shape):
        row = build.settled(row)
    return row


def emit(build: Builder, problem: Problem, q: fx.Node, k: fx.Node, v: fx.Node, row: fx.Node) -> fx.Node:
    """The call; fully masked rows hold some finite number.

    Args:
        q, k, v: operands, of the dtype of the kernel.
        row: the bias, as `bias` gives it.
    """
    node = build.call(
        torch.ops.aten._scaled_dot_product_cudnn_attention.default,
        q, k, v, row, problem.train, 0.0, True, scale=problem.scale,
    )  # fmt: skip
    return build.call(operator.getitem, node, 0)
