"""Keeps compiled graphs from kernels of torch and cuDNN that are known to be wrong: `known` lists them.

Here are those that a graph of aten operations reaches, the user's own calls of SDPA and of flex attention
among them. What the attention fusion must not emit is rejected there.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import fx

from ... import tags
from ..._inductor import (
    Match,
    computing_fakes,
    fails_on_broadcast_numbers,
    fake_mode_of,
    flex_attention_op,
    known_true,
    suppress_guards,
)
from ...fusion import Candidate, Fusion, Scope, nodes_of
from ...graph.builder import Builder
from ...graph.facts import change
from ...graph.inlined import put_in_place
from ...graph.products import unviewed
from ...layouts import pinning
from ...operands import repeated_dims, tensor, value
from .attention_gradients import SDPA_BACKWARDS, SDPA_FORWARDS, attention, flash, gradients
from .known import (
    BROADCAST_NUMBER,
    CUDNN_DECODING,
    CUDNN_ONE_QUERY,
    CUDNN_PADDED_KEYS,
    CUDNN_PLANS,
    FLASH_EXPANDED,
    KNOWN,
    Defect,
)
from .op import CUDNN_BACKWARD

__all__ = ["FUSION", "KNOWN", "Defect"]

aten = torch.ops.aten

_FORWARD = aten._scaled_dot_product_cudnn_attention.default
_BACKWARD = aten._scaled_dot_product_cudnn_attention_backward.default
_FLASH_BACKWARD = aten._scaled_dot_product_flash_attention_backward.default
#: Positions in the arguments of the forward, and in those of the backward.
_WITH_LOGSUMEXP, _FORWARD_DROPOUT, _FORWARD_CAUSAL = 4, 5, 6
_GRADIENT, _QUERY, _KEY, _VALUE, _LOGSUMEXP = 0, 1, 2, 3, 5
_BIAS, _MAX_KEYS, _DROPOUT, _CAUSAL = 8, 12, 13, 14
#: Operations whose operands Inductor lays out for SDPA's kernels.
_CALLS = [*SDPA_FORWARDS, *SDPA_BACKWARDS]
#: The last dim of these operands is a multiple of this.
_ALIGNED = 8
#: The largest head dim of flash attention.
_MOST_DIM = 256
#: Keys of a tile of the backward.
TILE = 128
#: Below this, exp(-logsumexp) may overflow in a dtype of the operands, with a margin.
LOW = {torch.bfloat16: -80.0, torch.float16: -4.0}


class FlexQuery(Candidate):
    """A query of flex attention whose strides are not fixed when the kernel for short queries reads them."""

    reported = False

    def __init__(self, call: fx.Node) -> None:
        self.anchor = call

    def guard(self) -> None:
        """Accept: the call is in the graph, and settling the strides costs neither memory nor time."""

    def rewrite(self) -> str:
        pinning.settle_query(self.anchor, {})
        return "the strides of the query are settled"


class CopiedOperands(Candidate):
    """Operands of SDPA's kernels with strides that a defect is about: they are copied."""

    reported = False

    def __init__(self, call: fx.Node, operands: Sequence[fx.Node], defect: Defect) -> None:
        self.anchor, self.operands, self.defect = call, operands, defect

    def guard(self) -> None:
        """Accept: the call is in the graph, and its kernel reads the operands from memory in any case."""

    def rewrite(self) -> str:
        build = Builder(self.anchor, kept=("stack_trace", "custom"))
        for operand in self.operands:
            self.anchor.replace_input_with(operand, _copied(build, operand))
        return self.defect.name


def _copied(build: Builder, operand: fx.Node) -> fx.Node:
    return build.call(aten.clone.default, operand, memory_format=torch.contiguous_format)


def _expanded(call: fx.Node) -> list[fx.Node]:
    """The queries, keys and values of a backward that are expanded."""
    operands = dict.fromkeys(call.args[i] for i in (_QUERY, _KEY, _VALUE))  # keys may be the values
    return [each for each in operands if isinstance(each, fx.Node) and repeated_dims(value(each))]


def _is_broadcast_number(node: fx.Node) -> bool:
    """Whether a node is a view of a tensor without dims, and its last dim may be no multiple of 8."""
    found, source = tensor(node), tensor(unviewed(node))
    if found is None or source is None or source.dim() or not found.dim():
        return False
    return not known_true(found.shape[-1] % _ALIGNED == 0)


def _is_differentiated_with_dropout(call: fx.Node) -> bool:
    keeps, dropout = (_argument(call, i) for i in (_WITH_LOGSUMEXP, _FORWARD_DROPOUT))
    return bool(keeps) and isinstance(dropout, float) and dropout > 0.0


def _scale(call: fx.Node, q: Any) -> float:
    """What a call multiplies the scores by."""
    given: Any = call.kwargs.get("scale")
    return 1 / math.sqrt(value(q).shape[-1]) if given is None else float(given)


def _argument(call: fx.Node, position: int) -> Any:
    return call.args[position] if position < len(call.args) else None


class CudnnCalls(Candidate):
    """The calls of cuDNN attention in one graph: forwards with dropout, and backwards."""

    def __init__(self, graph: fx.Graph, backward: Sequence[fx.Node], dropped: Sequence[fx.Node]) -> None:
        self.graph, self.backward, self.dropped = graph, backward, dropped
        self.anchor = (*backward, *dropped)[0]

    def describe(self) -> dict[str, str]:
        return {"calls": str(len(self.backward) + len(self.dropped))}

    def guard(self) -> None:
        """Accept: the calls are in the graph, and their results may be wrong as they are."""

    def rewrite(self) -> str:
        mode = fake_mode_of(self.graph)
        low, single = (
            [call for call in self.backward if wrong(call)] for wrong in (_may_overflow, _has_one_query)
        )
        by_flash = [call for call in self.backward if call in (*low, *single) and _flash_takes(call)]
        # The gradients of one query are little work, and need no kernel.
        written = [call for call in single if call not in by_flash]
        by_cudnn = [call for call in self.backward if call not in (*by_flash, *written)]
        for call in written:
            operands = [call.args[i] for i in (_GRADIENT, _QUERY, _KEY, _VALUE)]
            settings = (None, _scale(call, call.args[_QUERY]), bool(_argument(call, _CAUSAL)))
            put_in_place(call, gradients, (*operands, *settings))
        with suppress_guards(mode), torch.no_grad(), computing_fakes(mode):
            for call in self.dropped:
                given = list(call.args)
                given[_FORWARD_DROPOUT] = own_dropout(given[_FORWARD_DROPOUT])
                change(call, args=tuple(given))
            for call in by_flash:
                _use_flash(call)
            for call in by_cudnn:
                _Backward(self.graph, call).rewrite()
        names = [CUDNN_PLANS.name] * bool(by_cudnn or self.dropped)
        names += [CUDNN_PADDED_KEYS.name] * bool(low) + [CUDNN_ONE_QUERY.name] * bool(single)
        return f"cuDNN, cured of {' and '.join(names)}"


class Decoding(Candidate):
    """A call of cuDNN attention with one query, which its kernel computes wrongly on this device."""

    def __init__(self, call: fx.Node) -> None:
        self.anchor = call

    def guard(self) -> None:
        """Accept: the call is in the graph, and its result may be wrong as it is."""

    def rewrite(self) -> str:
        call = self.anchor
        q, k, v, bias = call.args[:4]
        scale, causal = _scale(call, q), bool(_argument(call, _FORWARD_CAUSAL))
        results = 2 if _argument(call, _WITH_LOGSUMEXP) else 1
        if bias is None and not causal and _have_dims_of_flash(*map(value, (q, k, v))):
            put_in_place(call, lambda *given: flash(*given)[:results], (q, k, v, scale))
        else:
            put_in_place(call, lambda *given: attention(*given)[:results], (q, k, v, bias, scale, causal))
        return f"cuDNN, cured of {CUDNN_DECODING.name}"


def decodes_wrongly(device: torch.device) -> bool:
    """Whether cuDNN attention of one query is wrong on a device, as torch 2.15 has it in sdp_utils.cpp."""
    version = torch.backends.cudnn.version() or 0
    known = 91900 <= version <= 92500 and version != 92401
    return known and torch.cuda.get_device_capability(device)[0] in (10, 11)


def _has_one_query(call: fx.Node) -> bool:
    """Whether a backward has one query, no mask and no dropout, which torch does not give to cuDNN then."""
    one = known_true(value(call.args[_QUERY]).shape[2] == 1)
    return one and _argument(call, _BIAS) is None and not _argument(call, _DROPOUT)


def _may_overflow(call: fx.Node) -> bool:
    """Whether a backward may read half a tile of keys that are not there, beside a row of low scores.

    A causal backward hides them. With dropout and without a mask it is left as it is: no other kernel draws
    the same elements, and a mask of the rows would take the memory of all scores.
    """
    keys = value(call.args[_KEY]).shape[2]
    hidden = _argument(call, _CAUSAL) or _argument(call, _DROPOUT)
    return not (_argument(call, _BIAS) is None and hidden) and not known_true(keys % TILE != TILE // 2)


def _flash_takes(call: fx.Node) -> bool:
    """Whether flash attention can compute a backward, from what cuDNN's forward saved."""
    q, k, v = (value(call.args[i]) for i in (_QUERY, _KEY, _VALUE))
    masked = _argument(call, _BIAS) is not None or _argument(call, _CAUSAL)
    plain = not masked and not _argument(call, _DROPOUT)
    alike = all(known_true(x.shape[1] == q.shape[1]) for x in (k, v))
    return plain and alike and _have_dims_of_flash(q, k, v)


def _have_dims_of_flash(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> bool:
    """Whether flash attention takes the head dims, and is not switched off."""
    dim = q.shape[3]
    fits = isinstance(dim, int) and dim % _ALIGNED == 0 and dim <= _MOST_DIM
    alike = fits and all(known_true(x.shape[3] == dim) for x in (k, v))
    return alike and torch.backends.cuda.flash_sdp_enabled()


def _use_flash(call: fx.Node) -> None:
    """Put flash attention's backward in the place of cuDNN's."""
    build = Builder(call, kept=("stack_trace", "custom"))
    for each in _expanded(call):
        call.replace_input_with(each, _copied(build, each))
    *operands, logsumexp, seed, offset, _, cum_q, cum_k, max_q, max_k, dropout, causal = call.args
    logsumexp = build.call(aten.squeeze.dim, logsumexp, 3)
    settings = (cum_q, cum_k, max_q, max_k, dropout, causal, seed, offset)
    made = build.call(_FLASH_BACKWARD, *operands, logsumexp, *settings, scale=call.kwargs.get("scale"))
    made.meta = {**call.meta, "val": made.meta["val"]}
    call.replace_all_uses_with(made)
    call.graph.erase_node(call)


def own_dropout(dropout: Any) -> float:
    """An equivalent dropout probability that calls outside of compiled graphs do not use.

    Plans are cached under its bits, so compiled calls get plans of their own. The probability is compared in
    float32: the next float32 number changes about one element in 10^7, and the forward uses it as well.
    """
    one = torch.tensor(float(dropout), dtype=torch.float32)
    return -0.0 if not dropout else float(torch.nextafter(one, torch.ones_like(one)))


class _Backward:
    """Rewrites one call of the backward."""

    def __init__(self, graph: fx.Graph, call: fx.Node) -> None:
        self.graph, self.call = graph, call
        self.build = Builder(call, kept=("stack_trace", "custom"))

    def rewrite(self) -> None:
        """Replace the call."""
        arguments: list[Any] = list(self.call.args)
        arguments.append(self.call.kwargs.get("scale"))
        keys = value(arguments[_KEY]).shape[2]
        low = _may_overflow(self.call)
        if low and arguments[_BIAS] is None:
            arguments[_BIAS] = self._no_bias()
        padded = low and isinstance(keys, int) and not arguments[_DROPOUT]
        if padded:
            extra = -keys % TILE
            for i in (_KEY, _VALUE):
                arguments[i] = self.build.call(aten.constant_pad_nd.default, arguments[i], [0, 0, 0, extra])
            arguments[_BIAS] = self._padded_bias(arguments[_BIAS], extra)
            arguments[_MAX_KEYS] = keys + extra
        elif low:
            arguments[_LOGSUMEXP], arguments[_BIAS] = self._shifted(arguments[_LOGSUMEXP], arguments[_BIAS])
        arguments[_DROPOUT] = own_dropout(arguments[_DROPOUT])
        made = self.build.call(CUDNN_BACKWARD, *arguments)
        made.meta = {**self.call.meta, "val": made.meta["val"]}
        self.call.replace_all_uses_with(made)
        self.graph.erase_node(self.call)
        if padded:
            self._cut(made, keys)

    def _no_bias(self) -> fx.Node:
        """A mask that hides nothing: one number, expanded to the shape of the scores."""
        q, k = (value(self.call.args[i]) for i in (_QUERY, _KEY))
        zero = self.build.call(aten.full.default, [1, 1, 1, 1], 0.0, dtype=q.dtype, device=q.device)
        return self.build.call(aten.expand.default, zero, [*q.shape[:3], k.shape[2]])

    def _padded_bias(self, bias: fx.Node, extra: int) -> fx.Node:
        """The bias with columns for masked keys; expanded dims stay expanded."""
        shape = list(value(bias).shape)
        for dim in repeated_dims(value(bias)):
            if dim < len(shape) - 1:
                bias = self.build.call(aten.slice.Tensor, bias, dim, 0, 1)
        bias = self.build.call(aten.constant_pad_nd.default, bias, [0, extra], -math.inf)
        return self.build.call(
            aten.expand.default, bias, [-1 if _fits(bias, d, n) else n for d, n in enumerate(shape)]
        )

    def _shifted(self, logsumexp: fx.Node, bias: fx.Node) -> tuple[fx.Node, fx.Node]:
        """The logsumexp and the mask, both shifted where the logsumexp is low: only their difference counts.

        The shift is a number of the dtype of q, so that the mask of keys with a weight stays exact. A fully
        masked row has weights of 0 with any logsumexp.
        """
        dtype, narrow = value(bias).dtype, value(self.call.args[_QUERY]).dtype
        rounded = self.build.truncated(logsumexp, narrow)
        zero = self.build.call(aten.full.default, [], 0.0, dtype=torch.float32, device=value(bias).device)
        low = self.build.call(aten.lt.Scalar, logsumexp, LOW[narrow])
        hidden = self.build.call(aten.eq.Scalar, logsumexp, -math.inf)
        shift = self.build.call(aten.where.self, low, rounded, zero)
        shift = self.build.call(aten.where.self, hidden, zero, shift)
        kept = self.build.call(aten.sub.Tensor, logsumexp, shift)
        kept = self.build.call(aten.where.self, hidden, zero, kept)
        if value(shift).dim() < value(bias).dim():
            shift = self.build.call(aten.unsqueeze.default, shift, -1)
        moved = self.build.call(aten.sub.Tensor, self.build.to(bias, torch.float32), shift)
        return kept, self.build.to(moved, dtype)

    def _cut(self, made: fx.Node, keys: int) -> None:
        """Cut the gradients of the padded keys off."""
        for user in list(made.users):
            if user.args[1] in (1, 2):
                readers = list(user.users)
                user.meta["val"] = made.meta["val"][user.args[1]]
                build = Builder(user.next, user, tuple(user.meta))
                part = build.call(aten.slice.Tensor, user, 2, 0, keys)
                user.replace_all_uses_with(part, delete_user_cb=readers.__contains__)


def _fits(node: fx.Node, dim: int, size: Any) -> bool:
    """Whether a dim is not expanded: it has its size, or is that of the keys, which was padded."""
    own = value(node).shape[dim]
    return dim == value(node).dim() - 1 or known_true(own == size)


FUSION = Fusion(
    name="kernel_defects",
    stage="post_grad",
    summary="calls of kernels with known bugs to calls that are correct",
    protects=True,
)


@FUSION.group(lambda: [_BACKWARD, _FORWARD])
def read(scope: Scope, matches: Sequence[Match]) -> Iterator[Candidate]:
    """The calls of cuDNN attention that take part in a backward, as one site: one cure serves them all."""
    calls = nodes_of(matches)
    backward = [node for node in calls if node.target is _BACKWARD]
    dropped = [node for node in calls if node.target is _FORWARD and _is_differentiated_with_dropout(node)]
    if backward or dropped:
        yield CudnnCalls(scope.graph, backward, dropped)


@FUSION.anchor(lambda: [_FORWARD])
def read_decoding(scope: Scope, match: Match) -> Candidate | None:
    """A call of cuDNN attention with one query."""
    call = match.output_node()
    q = value(call.args[0])
    if not known_true(q.shape[2] == 1) or _argument(call, _FORWARD_DROPOUT):
        return None
    return Decoding(call) if decodes_wrongly(q.device) else None


@FUSION.anchor(lambda: _CALLS)
def read_numbers(scope: Scope, match: Match) -> Candidate | None:
    """A call of SDPA's kernels with operands that are one number."""
    if not fails_on_broadcast_numbers():
        return None
    call = match.output_node()
    numbers = [each for each in call.all_input_nodes if _is_broadcast_number(each)]
    return CopiedOperands(call, numbers, BROADCAST_NUMBER) if numbers else None


@FUSION.anchor(lambda: [_FLASH_BACKWARD])
def read_expanded(scope: Scope, match: Match) -> Candidate | None:
    """A backward of flash attention with operands that are expanded."""
    call = match.output_node()
    expanded = _expanded(call)
    return CopiedOperands(call, expanded, FLASH_EXPANDED) if expanded else None


@FUSION.anchor(lambda: [flex_attention_op()])
def read_flex(scope: Scope, match: Match) -> Candidate | None:
    """A call of flex attention whose query has no settled strides."""
    call = match.output_node()
    return None if tags.is_ours(call) or pinning.query_of(call) is None else FlexQuery(call)
