"""What is known of wrong kernels in torch and cuDNN that a compiled attention can reach.

One entry a defect: where it is, when it shows, and what is done instead. `tests/gpu/test_kernel_defects.py`
shows each one in the bare kernel, so that an entry which is no longer needed is noticed.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Defect:
    """A kernel that computes something else than it says.

    Attributes:
        name: short, for reports and tests.
        where: the backend, or the template of Inductor.
        seen: versions of torch and of cuDNN on which it was seen.
        condition: when it shows.
        effect: what comes out.
        instead: what a compiled graph does.
        source: where it is described, or the file of torch that has it.
    """

    name: str
    where: str
    seen: str
    condition: str
    effect: str
    instead: str
    source: str


CUDNN_PLANS = Defect(
    name="cudnn_plans",
    where="backward of cuDNN attention",
    seen="torch 2.11, cuDNN 9.19",
    condition="an earlier backward in the thread had q, k, v and a mask of the same sizes and strides, and a "
    "gradient or an output of another layout",
    effect="wrong gradients: plans are cached without the strides of the output and of its gradient",
    instead="both are laid out as q, and compiled calls have plans of their own: their dropout probability "
    "is -0.0, or the next float, which no other call has",
    source="aten/src/ATen/native/cudnn/MHA.cpp (MHAParams), since pytorch#141147",
)
CUDNN_PADDED_KEYS = Defect(
    name="cudnn_padded_keys",
    where="backward of cuDNN attention",
    seen="torch 2.11, cuDNN 9.19",
    condition="a mask, 64 modulo 128 keys, and a query whose logsumexp is below -88.7",
    effect="NaN in the gradient of q: the last tile has keys behind the end, of score 0, and "
    "exp(0 - logsumexp) overflows",
    instead="keys, values and mask are padded to whole tiles with keys that nobody sees; with dropout, or "
    "where the number of keys is symbolic, such rows are shifted by their logsumexp",
    source="pytorch#196678",
)
CUDNN_ONE_QUERY = Defect(
    name="cudnn_one_query",
    where="backward of cuDNN attention",
    seen="cuDNN 9.25 and 9.26, by its report",
    condition="one query, no mask, and a logsumexp far below 0 (-122)",
    effect="NaN in the gradients of k and v",
    instead="the gradients are matrix products",
    source="NVIDIA/cudnn-frontend#1072",
)
CUDNN_MISALIGNED = Defect(
    name="cudnn_misaligned",
    where="backward of cuDNN attention",
    seen="torch 2.11, by its report",
    condition="the gradient begins at no multiple of 16 bytes",
    effect="an exception, behind which the device is of no use",
    instead="the gradient is copied",
    source="pytorch#191576",
)
MASK_ALONE = Defect(
    name="mask_alone",
    where="backward of efficient attention",
    seen="torch 2.6, by its report; mended by pytorch#188302",
    condition="a mask takes a gradient, and q, k and v do not",
    effect="an illegal memory access: the logsumexp that is read was not kept",
    instead="the attention is left as it is written",
    source="pytorch#148476",
)
NEGATIVE_SCALE = Defect(
    name="negative_scale",
    where="flash and cuDNN attention",
    seen="torch 2.11, cuDNN 9.19",
    condition="a scale of 0 or below",
    effect="NaN: scores that a tile lacks are -inf before they are scaled",
    instead="the sign, or the 0, goes into q",
    source="aten/src/ATen/native/transformers/cuda/attention.cu",
)
WHOLE_DROPOUT = Defect(
    name="whole_dropout",
    where="flash, efficient and cuDNN attention",
    seen="torch 2.11, cuDNN 9.19",
    condition="a dropout probability of 1",
    effect="an exception, or NaN (efficient)",
    instead="the attention is left as it is written",
    source="aten/src/ATen/native/transformers/cuda/attention.cu",
)
EMPTY_OPERANDS = Defect(
    name="empty_operands",
    where="backward of cuDNN and flash attention",
    seen="torch 2.11",
    condition="a batch, a length or a head dim of 0",
    effect="an exception",
    instead="the attention is left as it is written",
    source="aten/src/ATen/native/transformers/cuda/attention.cu",
)
FLEX_DECODING_QUERY = Defect(
    name="flex_decoding_query",
    where="flex attention, template for short queries",
    seen="torch 2.11 to 2.13",
    condition="inference, fewer than 128 queries, and q is computed in the same graph",
    effect="wrong values: the template reads q with the strides that it had before its layout was settled",
    instead="the layout of q is settled before",
    source="torch/_inductor/kernel/flex/flex_decoding.py",
)

FLEX_COUNTS = Defect(
    name="flex_counts",
    where="flex attention",
    seen="the sources of torch 2.11 to 2.13",
    condition="2^31 elements or more of a tensor that is captured",
    effect="other elements are read, or an illegal memory access: indices have 32 bits",
    instead="the attention is not given to flex attention",
    source="pytorch#145869",
)
ONE_NUMBER = Defect(
    name="one_number",
    where="templates of Inductor for Triton",
    seen="torch 2.11 to 2.13",
    condition="an output of one number",
    effect="another number: the store has no mask, and whatever else a tile holds goes there too",
    instead="no template is used",
    source="torch/_inductor/select_algorithm.py",
)

BROADCAST_NUMBER = Defect(
    name="broadcast_number",
    where="lowering of SDPA's operations in Inductor",
    seen="torch 2.11; mended in the sources of 2.13",
    condition="an operand on a GPU is one number for all places, such as the gradient of a sum, and its last "
    "dim is no multiple of 8",
    effect="an exception: the last size of a tensor without dims is read",
    instead="the operand is copied",
    source="torch/_inductor/lowering.py (sdpa_constraint)",
)

#: Every defect, as docs/reliability.md lists them.
KNOWN = (
    CUDNN_PLANS,
    CUDNN_PADDED_KEYS,
    CUDNN_ONE_QUERY,
    CUDNN_MISALIGNED,
    MASK_ALONE,
    NEGATIVE_SCALE,
    WHOLE_DROPOUT,
    EMPTY_OPERANDS,
    FLEX_DECODING_QUERY,
    FLEX_COUNTS,
    ONE_NUMBER,
    BROADCAST_NUMBER,
)
