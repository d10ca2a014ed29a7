"""Calls of `F.multi_head_attention_forward`, which is one operation to Dynamo.

`nn.MultiheadAttention` asks it for the weights by default, and then it writes them out.
Where nothing reads them it need not: without them it calls SDPA.
"""

from __future__ import annotations

import inspect
import math
import operator
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from ... import config, decisions
from ..._inductor import holds_now, records_gradients, value_of
from ...effects.inplace import arguments
from ...effects.liveness import erase_dead_readers, readers
from ...fusion import Candidate, Reported
from ...graph import torch_ops
from ...graph.builder import Builder
from ...operands import check_kind, may_use_tf32, profitable, text
from ...reasons import Reason
from .masks import classify, negation, visibility
from .problem import check_dropout
from .scope import Scope

#: Operations of torch that hold a whole attention.
FAST_PATHS = ("_transformer_encoder_layer_fwd", "_native_multi_head_attention")
_SIGNATURE = inspect.signature(F.multi_head_attention_forward)


def fast_path(call: fx.Node) -> Candidate:
    """A call of one operation that holds an attention with its linears, in inference."""
    why = Reason.CHOSEN.left_to_stock(
        "torch's fast path for inference computes this attention inside of one operation",
        "torch.backends.mha.set_fastpath_enabled(False) lets Inductor compile its parts",
    )
    return Reported(call, why)


class MultiheadForward(Candidate):
    """A call that may be asked for weights that nothing reads."""

    def __init__(self, scope: Scope, call: fx.Node) -> None:
        self.scope, self.anchor = scope, call
        args, kwargs = arguments(call)
        given = _SIGNATURE.bind(*args, **kwargs)
        given.apply_defaults()
        self.arguments: dict[str, Any] = dict(given.arguments)
        self.causal, self.note = False, ""

    def describe(self) -> dict[str, str]:
        found = {name: torch_ops.tensor(self.arguments[name]) for name in ("query", "key")}
        return {name: text(t) for name, t in found.items() if t is not None}

    def guard(self) -> None:
        query, key = (torch_ops.tensor(self.arguments[name]) for name in ("query", "key"))
        output = value_of(self.anchor)
        if query is None or key is None or not isinstance(output, tuple):
            raise Reason.NOT_A_TENSOR.rejected("an argument of multi_head_attention_forward is not a tensor")
        check_kind(query, key, torch_ops.tensor(self.arguments["value"]))
        self.scope.derivatives.check([self.anchor])
        if "MATH" not in self.scope.derivatives.modes.at(self.anchor).backends:
            raise Reason.NO_KERNEL.left_to_stock(
                "SDPA's math backend is disabled, and only it supports every attention"
            )
        if not self.arguments["need_weights"]:
            raise Reason.CHOSEN.left_to_stock(
                "multi_head_attention_forward without attention weights already calls SDPA"
            )
        for user in self.anchor.users:
            if user.target is not operator.getitem or user.args[1] not in (0, 1):
                raise Reason.NOT_A_TENSOR.rejected(
                    "the tuple of output and weights is used without unpacking"
                )
            if user.args[1] == 1 and readers(user):
                raise Reason.WEIGHTS.rejected(
                    "the attention weights are also used elsewhere", "need_weights=False"
                )
        if self.arguments["training"]:
            p = self.arguments["dropout_p"]
            if not isinstance(p, (int, float)):
                raise Reason.SYMBOLIC.rejected("the probability of the dropout is symbolic")
            check_dropout(p)
        if not all(holds_now(size >= 1) for size in (*query.shape, *key.shape)):
            raise Reason.EMPTY.rejected("an operand is empty or may be empty")
        kind = self._mask(query, key)
        if not config.always():
            batch = query.shape[1] if query.dim() == 3 else 1
            heads = self.arguments["num_heads"]
            sizes = (batch, heads, query.shape[0], key.shape[0], query.shape[-1])
            if not all(isinstance(size, int) for size in sizes):
                raise Reason.SYMBOLIC.left_to_stock("the sizes of multi_head_attention_forward are symbolic")
            decision = decisions.attention(
                device=query.device, dtype=query.dtype, mask=kind, train=bool(output[0].requires_grad),
                batch_heads=batch * heads, q_len=sizes[2], kv_len=sizes[3], head_dim=sizes[4] // heads,
                candidates=("sdpa",), tf32=query.device.type == "cuda" and may_use_tf32(),
            )  # fmt: skip
            self.note = f", {profitable(decision).note}"

    def _mask(self, query: torch.Tensor, key: torch.Tensor) -> str:
        """The class of the mask, as tables name it; whether it is proved causal is kept."""
        mask, padding = self.arguments["attn_mask"], self.arguments["key_padding_mask"]
        if mask is None:
            return "none" if padding is None else "pad"
        found = torch_ops.tensor(mask)
        if found is None:
            raise Reason.NOT_A_TENSOR.rejected("the mask of multi_head_attention_forward is not a tensor")
        hidden = mask if found.dtype == torch.bool else _hidden(mask)
        shape = (1, 1, query.shape[0], key.shape[0])
        more = ("bias_k", "bias_v", "static_k", "static_v")  # keys that are not those of `key`
        plain = not self.arguments["add_zero_attn"] and all(self.arguments[name] is None for name in more)
        proved = plain and found.dim() == 2 and self._is_causal(mask if hidden is None else hidden, shape)
        self.causal = proved and padding is None
        if not proved and hidden is None:
            raise Reason.EMPTY_ROWS.left_to_stock("a row may be fully masked", "pass a boolean mask")
        if self.causal:
            return "causal"
        return "bias_batch" if found.dim() == 2 and padding is None else "bias_full"

    def _is_causal(self, mask: fx.Node, shape: tuple[Any, ...]) -> bool:
        """Whether a mask, additive or True where a key is hidden, is proved causal."""
        found = torch_ops.tensor(mask)
        assert found is not None
        with self.scope.interpreter.reading(self.anchor):
            if found.dtype != torch.bool:
                read = None if found.requires_grad else visibility(self.scope.interpreter.read(mask))
                return read is not None and classify(read[0], shape) == "causal"
            visible = self.scope.interpreter.boolean(mask)
        return visible is not None and classify(negation(visible), shape) == "causal"

    def rewrite(self) -> str:
        arguments = {**self.arguments, "need_weights": False, "is_causal": self.causal}
        mask, out = arguments["attn_mask"], value_of(self.anchor)[0]
        if mask is not None and not self.causal and records_gradients(out):
            arguments["attn_mask"] = self.scope.keeping.kept(mask, self.anchor)  # an addition keeps none
        build = Builder(self.anchor, kept=tuple(self.anchor.meta))
        new = build.given((out, None), F.multi_head_attention_forward, **arguments)
        for user in list(self.anchor.users):
            if user.args[1] == 1:
                erase_dead_readers([user])
                self.scope.graph.erase_node(user)
        self.anchor.replace_all_uses_with(new)
        self.scope.graph.erase_node(self.anchor)
        return f"sdpa{', is_causal' if self.causal else ''}, in multi_head_attention_forward{self.note}"


def _hidden(mask: fx.Node) -> fx.Node | None:
    """The boolean mask, True where a key is hidden, of which nn.MultiheadAttention made an additive one."""
    fill = torch_ops.read(mask)
    if fill is None or fill.name != "masked_fill" or torch_ops.concrete(fill["value"]) != -math.inf:
        return None
    zeros, hidden = torch_ops.read(fill["input"]), fill["mask"]
    if zeros is None or zeros.name != "zeros_like" or not isinstance(hidden, fx.Node):
        return None
    # Nothing else may write into it.
    called = {user.target for user in readers(mask)}
    if set(readers(zeros.node)) != {mask} or called - {F.multi_head_attention_forward}:
        return None
    return hidden
