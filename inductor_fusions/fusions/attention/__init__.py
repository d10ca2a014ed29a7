"""Fuses attention, hand-written or SDPA, to the fastest equivalent kernel.

`recognise` reads the attention around a softmax into its `normal_form`. `masks` proves which keys its mask
shows. `problem` brings it to (batch, heads, length, dim). `kernels` selects a kernel, and `emit` writes the
call.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ...fusion import Fusion
from ...graph.torch_ops import PRODUCTS, forms
from . import sites
from .multihead import FAST_PATHS, MultiheadForward, fast_path
from .recognise import is_in_attention, is_written_out
from .scope import scope_of
from .unnormalised import over_edges, recurrent, without_softmax
from .written_out import EXPONENTIALS, SOFTMAXES, weights_of

FUSION = Fusion(
    name="attention",
    stage="pre_grad",
    summary="softmax(q @ k^T) @ v and SDPA calls to the fastest fused attention kernel",
    scope=scope_of,
)
FUSION.anchor(lambda: forms(*SOFTMAXES), is_in_attention)(
    lambda scope, match: sites.hand_written(scope, match.output_node())
)
FUSION.anchor(lambda: [*forms(*EXPONENTIALS), "exp_", torch.exp_], is_written_out)(
    lambda scope, match: sites.hand_written(scope, weights_of(match.output_node()))
)
FUSION.anchor(lambda: [*forms(*EXPONENTIALS), "exp_", torch.exp_])(
    lambda scope, match: over_edges(match.output_node())
)
FUSION.anchor(lambda: forms(*PRODUCTS - {"linear"}))(
    lambda scope, match: without_softmax(match.output_node())
)
FUSION.anchor(lambda: forms("add"))(lambda scope, match: recurrent(match.output_node()))
FUSION.anchor(lambda: forms("scaled_dot_product_attention"))(
    lambda scope, match: sites.SdpaCall(scope, match.output_node())
)
FUSION.anchor(lambda: forms(*FAST_PATHS))(lambda scope, match: fast_path(match.output_node()))
FUSION.anchor(lambda: [F.multi_head_attention_forward])(
    lambda scope, match: MultiheadForward(scope, match.output_node())
)
