"""An RMSNorm in front of linears of a few rows, inside the kernel that reads their weights.

In decoding, a norm of one row is a kernel of its own whose time is that of a launch. The kernels for up to
four rows read the whole input in every thread block, so each of them can add up its squares on the way:

    y = rsqrt(mean(x * x) + eps) * ((x * gain) @ W)

The linears are those that `linear_epilogue`, `qkv` and `gated_mlp` have made kernels of. One row was
measured; more are fused under the policy "always" alone.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from ... import config
from ..._inductor import Match, max_autotune
from ...block_mm import guards
from ...block_mm.configurations import step_with_norm
from ...block_mm.heuristics import choose
from ...block_mm.op import BLOCK_MM, Call
from ...fusion import Candidate, Fusion, Rejected, Scope
from ...graph.builder import Builder, substitute
from ...graph.products import RESHAPES, is_pointwise, kind, same_sizes, through, users_behind
from ...operands import value
from ...reasons import Reason
from .recognise import MEANS, Norm, norm_of

aten = torch.ops.aten

#: How many arguments `block_mm` has before those of a norm.
_PLAIN = 11
#: Which of them are the factors of the products.
_SCALES = 5
#: Bytes of weights up to which the norm costs a kernel less than a launch: what it costs grows with them,
#: twice as fast with short steps.
_WIDE = 2**28


class NormedLinears(Candidate):
    """A norm, and the linears of a few rows that read it.

    Args:
        calls: of `block_mm`, whose kernels read the whole input in each thread block.
        others: what else reads the norm.
    """

    def __init__(self, norm: Norm, calls: Sequence[fx.Node], others: Sequence[fx.Node]) -> None:
        self.norm, self.calls, self.others = norm, calls, others
        self.anchor = norm.result

    def describe(self) -> dict[str, str]:
        weights = [guards.text(b) for node in self.calls for b in _call(node).b]
        return {"input": guards.text(self.norm.x), "linears": ", ".join(weights)}

    def guard(self) -> None:
        if self.norm.why is not None:
            raise self.norm.why
        if self.others:
            raise Rejected(guards.read_elsewhere("the result of the norm", self.others))
        for node in self.calls:
            guards.check_layout(value(self.norm.x).reshape(value(_call(node).a[0]).shape))
        if not config.always():
            if any(value(_call(node).a[0]).shape[0] != 1 for node in self.calls):
                raise Reason.NOT_MEASURED.left_to_stock("only norms of one row were measured")
            if not _is_stored(self.norm.x):
                raise Reason.NOT_FASTER.left_to_stock(
                    "stock computes the input of the norm in the kernel of the norm, which would stay"
                )
            most = _WIDE if step_with_norm(value(self.norm.x).shape[-1]) >= 1024 else _WIDE // 2
            if any(_bytes(node) > most for node in self.calls):
                raise Reason.NOT_FASTER.left_to_stock(
                    f"with over {most >> 20} MiB of weights, the norm costs the linears more than its launch"
                )
        if max_autotune():
            raise Reason.NOT_FASTER.left_to_stock(
                "autotuning compares the kernels of the linears with stock's, which have no norm"
            )

    def rewrite(self) -> str:
        norm = self.norm
        for node in self.calls:
            call, build = _call(node), Builder(node)
            x = build.call(aten.reshape.default, norm.x, list(value(call.a[0]).shape))
            first = call.first()
            inputs = [x if p in first else a for p, a in enumerate(call.a)]
            scales = [scale * norm.scale if p in first else scale for p, scale in enumerate(call.scales)]
            others = (*node.args[1:_SCALES], scales, *node.args[_SCALES + 1 : _PLAIN - 1], call.decided)
            normed = (norm.eps, norm.gain, norm.shift, norm.clamps)
            substitute(node, build.call(BLOCK_MM, inputs, *others, *normed))
        return "block_mm, row, with the norm of its input"


def _call(node: fx.Node) -> Call:
    given: tuple[Any, ...] = node.args
    return Call(*given)


def _bytes(node: fx.Node) -> int:
    """The size of the weights that a call reads."""
    return sum(value(b).numel() * value(b).itemsize for b in _call(node).b)


def _is_stored(x: fx.Node) -> bool:
    """Whether the input of a norm is in memory without a kernel of its own.

    It is if it is an input of the graph or the result of a product. Pointwise operations that alone read a
    result of `block_mm` are in the kernel of that.
    """
    if x.op != "call_function" or kind(x).kernel:
        return True
    waiting = [x]
    while waiting:
        node = waiting.pop()
        if node is not x and len(node.users) > 1:
            continue
        if node.target is operator.getitem and node.all_input_nodes[0].target is BLOCK_MM:
            return True
        if is_pointwise(node) or node.target in RESHAPES:
            waiting += node.all_input_nodes
    return False


def _takes(node: fx.Node, result: fx.Node) -> bool:
    """Whether the kernel of a node applies the norm: it is that for a few rows, and all groups read the norm.

    A later product of a group, as of an adapter, must not.
    """
    if node.target is not BLOCK_MM or node.kwargs or _call(node).eps is not None:
        return False
    call = _call(node)
    # A reshape of the last dim makes other rows than those of the norm.
    width = value(result).shape[-1:]
    first = [
        through(call.a[p], RESHAPES) is result and same_sizes(value(call.a[p]).shape[1:], width)
        for p in call.first()
    ]
    rest = [a for p, a in enumerate(call.a) if p not in call.first()] + [*call.b, *call.bias]
    if not all(first) or any(through(other, RESHAPES) is result for other in rest):
        return False
    problem = guards.problem_of(call.a, call.b, call.groups, call.gated, call.names[0])
    chosen = choose(problem, value(call.a[0]).device, call.decided or None)
    return chosen.template == "row"


FUSION = Fusion(
    name="norm_linear",
    stage="post_grad",
    summary="an RMSNorm in front of linears of one row, inside their kernels",
    after=("linear_epilogue", "qkv", "gated_mlp", "lora"),
)


@FUSION.anchor(lambda: [*MEANS])
def read(scope: Scope, match: Match) -> Candidate | None:
    """The norm of which this is the mean, if a kernel that could apply it reads it."""
    norm = norm_of(match.output_node())
    users = list(dict.fromkeys(users_behind(norm.result, RESHAPES))) if norm is not None else []
    calls = [user for user in users if norm is not None and _takes(user, norm.result)]
    if norm is None or not calls:
        return None
    return NormedLinears(norm, calls, [user for user in users if user not in calls])
