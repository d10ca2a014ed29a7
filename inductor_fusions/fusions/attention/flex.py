"""Emits flex attention: a score_mod and a mask_mod as graphs, and a block mask computed in the graph.

The call is the higher-order operation of torch/_higher_order_ops/flex_attention.py, as Dynamo writes it
for `torch.nn.attention.flex_attention`. AOTAutograd derives its backward, gradients of captured tensors
included, and Inductor has a Triton template for it.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from ... import decisions
from ..._inductor import (
    counts_in_32_bits,
    flex_attention_op,
    flex_block_mask,
    hint,
    known_true,
    max_autotune,
)
from ...graph import torch_ops
from ...graph.builder import Builder
from ...operands import requires_grad
from .flex_body import Body
from .masks import Bool
from .normal_form import SCORE_FUNCTIONS, Stage
from .operands import Operand
from .predicates import BlockWriter, Writer
from .problem import Problem, is_number
from .structure import BATCH, KEY, QUERY

#: More blocks than any row has.
MOST_BLOCKS = 2**30
#: Side of a block: the one that `create_block_mask` takes by default.
BLOCK = 128
#: Types of devices that the fusion emits it for. The template for a CPU is for inference alone, returns no
#: logsumexp, raises where a pointwise operation is fused behind it, and returns 0 for a row of NaN.
DEVICES = frozenset({"cuda"})

#: (what makes something, *key): what it gives, or gave for an equal key.
Once = Callable[..., tuple[fx.Node, ...]]
#: No blocks of a kind.
NONE: tuple[Any, Any] = (None, None)


def _block_mask(
    build: Builder, visible: Bool, shape: Sequence[Any], device: torch.device, train: bool
) -> tuple[fx.Node, ...]:
    """Which blocks of keys each block of queries reads, partly and wholly, and for training the reverse."""
    writer = BlockWriter(build, shape, BLOCK, device)
    blocks = writer.blocks(visible)
    whole = writer.whole_blocks()
    none = build.call(operator.and_, whole, False)
    some = build.call(operator.or_, none, blocks.some)
    full = build.call(operator.and_, build.call(operator.and_, whole, blocks.all), some)
    part = build.call(operator.and_, some, build.call(torch.logical_not, full))
    nodes: list[fx.Node] = []
    for transposed in (False, True) if train else (False,):
        for dense in (part, full):
            if transposed:
                dense = build.call("transpose", dense, -1, -2)
            length = shape[QUERY if transposed else KEY]
            nodes += _ordered(build, dense, build.call(torch.arange, 0, length, BLOCK, device=device))
    return tuple(nodes)


def _ordered(build: Builder, dense: fx.Node, starts: fx.Node) -> tuple[fx.Node, fx.Node]:
    """How many of each row's blocks are set, and their numbers first, then those of the others.

    The place of each is counted, not found by `torch.argsort` as `create_block_mask` does it: a sort in
    registers takes Triton half a minute to compile at 64 blocks.
    """
    number = build.call(torch.floor_divide, starts, BLOCK)
    # Set blocks keep their numbers, the others come behind all of them.
    rank = build.call(torch.where, dense, number, build.call(torch.add, number, MOST_BLOCKS))
    before = build.call(torch.lt, build.call("unsqueeze", rank, -2), build.call("unsqueeze", rank, -1))
    place = build.call(torch.sum, before, -1)
    at = build.call(torch.eq, build.call("unsqueeze", place, -2), build.call("unsqueeze", number, -1))
    order = build.call(torch.sum, build.call(torch.where, at, number, 0), -1)
    count = build.call(torch.sum, dense, -1)
    return _dense_strides(build, count), _dense_strides(build, order)


def _dense_strides(build: Builder, node: fx.Node) -> fx.Node:
    """A tensor as int32, with the strides of a contiguous one in dims of size 1 as well.

    The template (kernel/flex/templates/flex_attention.py.jinja) steps from sample to sample by the stride
    of the heads, of which a mask has one; Inductor lays out a dim of size 1 as it comes, and that step would
    go out of bounds. A call of `as_strided` pins the strides of what it is given.
    """
    node = build.call("contiguous", build.call("to", node, torch.int32))
    sizes = [
        size if isinstance(size, int) else build.call("size", node, dim)
        for dim, size in enumerate(build.value(node).shape)
    ]
    strides: list[Any] = [1]
    for size in sizes[:0:-1]:
        last = strides[0]
        if isinstance(size, int) and isinstance(last, int):
            strides.insert(0, size * last)
        else:
            strides.insert(0, build.call(operator.mul, last, size))
    return build.call(torch.as_strided, node, sizes, strides)


def emit(
    build: Builder, problem: Problem, once: Once, q: fx.Node, k: fx.Node, v: fx.Node, dense: fx.Node | None,
    lse: bool,
) -> tuple[fx.Node, fx.Node | None]:  # fmt: skip
    """The call, as (result, logsumexp of the natural logarithm or None).

    Args:
        problem: what to compute; its structure is the mask, its stages and biases the score_mod.
        once: gives a block mask that is made already.
        q, k, v: operands of one dtype, k and v with heads of their own.
        dense: what is left of the mask, as SDPA would take it.
        lse: whether the logsumexp is wanted.
    """
    device = problem.q.value.device
    body = Body(build, True, device)
    score = _score(build, body, problem, dense)
    score_mod, score_captured = body.finish(score, "score_mod")
    mask = Body(build, False, device)
    blocks: tuple[fx.Node, ...] = ()
    if problem.structure is None or problem.structure.visible is True:
        seen: Any = mask.call("new_ones", mask.index[BATCH], (), dtype=torch.bool)
    else:
        visible, train = problem.structure.visible, problem.train
        seen = Writer(mask, mask.index, mask.load).condition(visible)
        shape = (*problem.q.shape[:3], problem.k.shape[2])
        blocks = once(
            lambda: _block_mask(build, visible, shape, device, train),
            "blocks", visible, shape[2:], device, train,
        )  # fmt: skip
    mask_mod, mask_captured = mask.finish(seen, "mask_mod")
    lengths = (build.number(problem.q.shape[2]), build.number(problem.k.shape[2]))
    block_mask = _as_tuple(build, problem, lengths, blocks, mask_mod)
    scale, options = problem.first_scale, _options(problem, lse, bool(blocks))
    shape = (*problem.q.shape[:3], problem.v.shape[-1])
    values = (
        problem.q.value.new_empty(shape, dtype=problem.dtype),
        problem.q.value.new_empty(shape[:3], dtype=torch.float32),
    )
    node = build.given(
        values, flex_attention_op(), q, k, v, score_mod, block_mask, scale, options, score_captured,
        mask_captured,
    )  # fmt: skip
    out = build.call(operator.getitem, node, 0)
    if not lse:
        return out, None
    # The kernel counts in powers of two.
    return out, build.call(torch.mul, build.call(operator.getitem, node, 1), math.log(2.0))


def _score(build: Builder, body: Body, problem: Problem, dense: fx.Node | None) -> Any:
    """The score that the softmax takes, computed from q . k * scale."""
    score: Any = body.score
    for position, (stage, terms, operand) in enumerate(problem.stages):
        if position and stage.scale != 1.0:
            score = body.call(torch.mul, score, stage.scale)
        for factor, term in terms:
            score = body.call(torch.add, score, _scaled(body, _element(body, problem, term), factor))
        score = _apply(body, problem, stage, score, operand)
        for kind, by in problem.late_scalers[position]:
            score = body.call(_PRODUCTS[kind], score, _scaled(body, _factor(body, problem, by), 1.0))
    if problem.stages and problem.scale != 1.0:
        score = body.call(torch.mul, score, problem.scale)
    structure = problem.structure
    for bias, bias_operand in structure.biases if structure is not None else []:
        element = _element(body, problem, bias_operand)
        score = body.call(torch.add, score, _scaled(body, element, bias.factor))
    if dense is not None:
        found = body.load_score(dense)
        if build.value(dense).dtype == torch.bool:
            score = body.call(torch.where, found, score, -math.inf)
        else:
            score = body.call(torch.add, score, _scaled(body, found, 1.0))
    return score


def _scaled(body: Body, value: Any, factor: float) -> Any:
    value = body.call("to", value, torch.float32)
    return value if factor == 1.0 else body.call(torch.mul, value, factor)


_PRODUCTS = {"mul": torch.mul, "div": torch.div}


def _element(body: Body, problem: Problem, operand: Operand) -> Any:
    """The element of a tensor beside q, k and v for this score."""
    return body.load_score(_indexable(body, problem, operand.built(body.outer), requires_grad(operand.node)))


def _factor(body: Body, problem: Problem, by: Operand | fx.Node) -> Any:
    """The factor of this score after a function of it: an element of a tensor, or a symbolic number."""
    if isinstance(by, Operand) and not is_number(by):
        return _element(body, problem, by)
    build, node = body.outer, by.node if isinstance(by, Operand) else by
    # Mods capture tensors of one device. A product, because AOTAutograd keeps symbolic numbers in these.
    one = build.call(torch.ones, (), dtype=torch.float32, device=problem.q.value.device)
    number = build.call(torch.mul, one, node)
    return body.load_score(_indexable(body, problem, number, requires_grad(node)))


def _indexable(body: Body, problem: Problem, node: fx.Node, learns: bool) -> fx.Node:
    """A tensor that mods can read: one that takes a gradient must have a dim to be indexed at.

    A row for each query, so that few scores add up their gradients at one address.
    """
    if learns and all(known_true(size == 1) for size in body.outer.value(node).shape):
        return body.outer.call(
            "expand", body.outer.call("reshape", node, (1, 1, 1, 1)), (*problem.q.shape[:3], 1)
        )
    return node


def _apply(body: Body, problem: Problem, stage: Stage, score: Any, operand: Operand | None) -> Any:
    if operand is not None:
        other = _element(body, problem, operand)
        if stage.function in ("where", "where_not"):
            fill = body.call(torch.full_like, score, stage.numbers[0])
            first, second = (fill, score) if stage.function == "where" else (score, fill)
            return body.call(torch.where, other, first, second)
        return body.call(_PRODUCTS[stage.function], score, _scaled(body, other, 1.0))
    if stage.function == "tanh" and problem.dtype.itemsize == 2:
        # A third of the instructions, with an absolute error of 1e-7: nothing beside products of half
        # precision. Its gradient, through that of the sigmoid, is as good.
        half = body.call(torch.sigmoid, body.call(torch.mul, score, 2.0))
        return body.call(torch.sub, body.call(torch.mul, half, 2.0), 1.0)
    return body.call(SCORE_FUNCTIONS[stage.function], score, *stage.numbers)


def _as_tuple(
    build: Builder, problem: Problem, lengths: tuple[Any, Any], blocks: tuple[fx.Node, ...], mask_mod: fx.Node
) -> tuple[Any, ...]:
    if blocks:
        rows, full, columns, full_columns = (
            (blocks[i], blocks[i + 1]) if i < len(blocks) else NONE for i in range(0, 8, 2)
        )
        return flex_block_mask(lengths, rows, full, columns, full_columns, BLOCK, mask_mod)
    device = problem.q.value.device
    one = build.call(torch.ones, (1, 1, 1), dtype=torch.int32, device=device)
    zero = build.call(torch.zeros, (1, 1, 1, 1), dtype=torch.int32, device=device)
    columns = (one, zero) if problem.train else NONE
    return flex_block_mask(lengths, (one, zero), NONE, columns, NONE, None, mask_mod)


def _options(problem: Problem, lse: bool, blocked: bool) -> dict[str, Any]:
    """Options of the kernel, as `torch.nn.attention.flex_attention` sets them."""
    structure = problem.structure
    # The template for few queries takes those of all heads that share keys as one tile, and has no choice
    # where that is larger than a block of the mask.
    q_len, groups = problem.q.shape[2], problem.q.shape[1] // problem.k.shape[1]
    one_head = known_true(groups == 1)
    fits = not blocked or one_head or known_true(q_len >= BLOCK) or known_true(q_len * groups <= BLOCK)
    return {
        **_tiles(problem),
        **({} if fits else {"FORCE_USE_FLEX_ATTENTION": True}),
        "PRESCALE_QK": False,
        # Not only the row: its part in each block that is read must hold a key.
        "ROWS_GUARANTEED_SAFE": structure is None or structure.visible is True,
        "BLOCKS_ARE_CONTIGUOUS": False,
        "WRITE_DQ": True,
        "OUTPUT_LOGSUMEXP": problem.train or lse,
        "OUTPUT_MAX": False,
    }


def _tiles(problem: Problem) -> dict[str, int]:
    """The tiles that are measured to be fastest; none where Inductor searches them, or for few queries."""
    q_len, dims = problem.q.shape[2], (problem.q.shape[3], problem.v.shape[3])
    decodes = not known_true(q_len >= BLOCK)  # Inductor has another template for these
    if decodes or max_autotune() or dims[0] != dims[1]:
        return {}
    return decisions.flex_options(
        device=problem.q.value.device,
        dtype=problem.dtype,
        mask=problem.flex_kind,
        batch_heads=hint(problem.q.shape[0] * problem.q.shape[1]),
        q_len=hint(q_len),
        kv_len=hint(problem.k.shape[2]),
        head_dim=dims[0],
    )


def takes(problem: Problem) -> str:
    """Why flex attention does not take a problem; empty where it does."""
    device = problem.q.value.device.type
    dims = (problem.q.shape[3], problem.v.shape[3])
    if problem.dropout > 0:
        return "flex attention has no dropout"
    if problem.transformed:
        return "flex attention does not support torch.func.grad"
    if device not in DEVICES:
        return f"flex attention is used on {' and '.join(sorted(DEVICES))} only, not on {device}"
    if not all(isinstance(dim, int) for dim in dims):
        return "flex attention needs constant head dims"
    if min(dims) < 16:
        return "flex attention needs head dims of at least 16"
    if problem.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return f"flex attention does not support {problem.dtype}"
    if counts_in_32_bits() and any(hint(node.numel()) >= 2**31 for node in _read(problem)):
        return "flex attention of this torch supports at most 2^31 elements in a tensor"
    if not isinstance(problem.first_scale, (int, float)):
        return "flex attention needs a constant scale"
    if problem.train and _learns(problem):
        if torch.are_deterministic_algorithms_enabled():
            return "flex attention's gradient of a bias is not deterministic"  # it is added up atomically
        if not all(isinstance(size, int) for t in (problem.q, problem.k, problem.v) for size in t.shape):
            return "Inductor does not lower flex attention's gradient of a bias with symbolic sizes"
    return ""


def _read(problem: Problem) -> list[torch.Tensor]:
    """Everything that the kernel reads, before it is expanded."""
    nodes = [operand.node for operand in (problem.q, problem.k, problem.v, *_beside(problem))]
    return [value for node in nodes if (value := torch_ops.tensor(node)) is not None]


def _beside(problem: Problem) -> list[Operand]:
    """The masks and biases of the scores."""
    read = [operand for _, operand in problem.terms]
    read += [operand for _, biases, _ in problem.stages for _, operand in biases]
    return read + [operand for _, _, operand in problem.stages if operand is not None]


def _learns(problem: Problem) -> bool:
    """Whether a tensor that the kernel reads beside q, k and v takes a gradient."""
    late = (by for scalers in problem.late_scalers for _, by in scalers)
    return any(map(requires_grad, (*problem.mask_nodes, *(each.node for each in _beside(problem)), *late)))
