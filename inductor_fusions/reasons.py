"""The closed list of reasons why a site is not fused: a code, its meaning, and what the user can do.

A guard raises a member with its message: `raise Reason.DTYPE.rejected("a result of dtype float64")`. The
message is a str that also carries the reason.
"""

from __future__ import annotations

from enum import Enum


class Said(str):
    """The message of one site, with its reason."""

    reason: Reason


class Rejected(Exception):
    """The site is not proved to compute what the fused kernel computes.

    Args:
        reason: the first condition that failed, in words. It has a code if a member of `Reason` made it.
        hint: what the user can change, or "".
    """

    def __init__(self, reason: str, hint: str = "") -> None:
        super().__init__(reason)
        self.reason, self.hint = reason, hint

    @property
    def code(self) -> str:
        """The code of the reason."""
        return code_of(self.reason)


class LeftToStock(Rejected):
    """The site could be fused, but is not expected to be faster."""


class Reason(Enum):
    """Why a site is not fused.

    Attributes:
        code: the name in reports: lower case, with hyphens.
        remedy: what the user can do.
    """

    # -- every fusion
    DEVICE = (
        "No kernel exists for this device, or none that is expected to be faster there.",
        "CPU: nothing, the library's matrix products are as fast. CUDA: a GPU of compute capability "
        "8.0 or later.",
    )
    DTYPE = (
        "No kernel supports the dtype of an operand or of the result.",
        "Use bfloat16 or float16, or float32 where the message says that it is supported.",
    )
    MIXED_DTYPES = (
        "The operands have different dtypes or devices that no kernel combines, or autocast would cast them.",
        "Cast the operands to one dtype. Float32 adapters on a bfloat16 base are supported.",
    )
    TF32 = (
        "The operands are float32 and TF32 is off. No kernel is faster than the library in full float32.",
        'Call `torch.set_float32_matmul_precision("high")` if TF32 is precise enough.',
    )
    LAYOUT = (
        "No kernel reads or writes a matrix with these strides, or with this alignment.",
        "Pad rows and columns to multiples of 16 bytes. Call `contiguous()` on a matrix that has no "
        "dim of stride 1.",
    )
    SHAPES = (
        "The shapes do not match, or an operand is broadcast where the kernel needs an element for "
        "each result.",
        "Expand the operands to the shape of the result.",
    )
    SYMBOLIC = (
        "A size is symbolic, and fusing is not known to be right or profitable for all its values.",
        "Compile with `dynamic=False`, or mark fewer dims as dynamic.",
    )
    EMPTY = (
        "An operand has, or may have, a dim of size 0.",
        "If the size is symbolic, call `torch._check(n > 0)` before the operation.",
    )
    LIMIT = (
        "The site exceeds a limit of the kernel: too many products, too high a rank, too many features, or "
        "a batch of matrices instead of one.",
        "Use fewer adapters in one sum, lower ranks, fewer features, or one product for each matrix, if the "
        "model allows it.",
    )
    NOT_A_TENSOR = (
        "An argument is not of a supported kind: a tensor, a number, or a boolean mask.",
        "Pass a tensor where the operation expects one, and a constant where it expects a number.",
    )
    USED_ELSEWHERE = (
        "Another operation also reads an intermediate value that the fused kernel does not write to memory.",
        "Remove the other reader. In training it may be the backward.",
    )
    OVERWRITTEN = (
        "An in-place write changes memory that the fused operation reads, or that it saves for the backward.",
        "Write out of place, or write before the first operation of the site.",
    )
    MODE = (
        "Grad mode, autocast or the allowed backends of SDPA change between the operations of the site.",
        "Put all of the operations inside the same context manager.",
    )
    TRANSFORM = (
        "The site is inside a transform of torch.func or a higher-order derivative that the fused "
        "operation does not support.",
        "Compile the inner function on its own, or leave this graph to stock.",
    )
    SUBCLASS = (
        "An operand is of a subclass of Tensor, such as DTensor.",
        "Pass local tensors, as `ColwiseParallel` does by default, or `x.as_subclass(torch.Tensor)`.",
    )
    ORDER = (
        "The operations cannot be moved together: one result is needed before all operands are computed.",
        "Compute the linears that share an input directly after one another.",
    )
    MEMORY = (
        "Fusing would raise peak memory, because more tensors would be live at the same time.",
        "Nothing, or what the hint says.",
    )
    ROUNDED = (
        "An intermediate value is rounded to a dtype of lower precision than operands and result.",
        "Cast before the first operation of the site, or after the last.",
    )
    RANGE = (
        "A number is zero, infinite, too large or too small for the kernel to reproduce eager's result, or a "
        "float16 value may overflow.",
        "Mask with `torch.finfo(dtype).min` or `-inf`; keep scales finite and nonzero; use bfloat16.",
    )
    NOT_MEASURED = (
        "No measurement covers this device, or no measured shape is close to this one.",
        "Measure it: `python -m inductor_fusions tune run SCRIPT`, or `INDUCTOR_FUSIONS_MEASURE=1` "
        "during the compile. `INDUCTOR_FUSIONS_POLICY=always` fuses without measurements.",
    )
    NOT_FASTER = (
        "Stock is measured or estimated to be at least as fast here.",
        "Nothing. `INDUCTOR_FUSIONS_POLICY=always` fuses anyway, for a comparison.",
    )
    EAGER_BITS = (
        "`torch._inductor.config.numerics` asks for eager's results bit for bit; a fused kernel "
        "rounds differently.",
        "Reset `torch._inductor.config.numerics` to its default.",
    )
    PACKAGE = (
        "The code is compiled to a package of AOTInductor, which is to run without Python, and the fused "
        "operation is a Python function.",
        "Nothing. `torch.compile` fuses the site.",
    )
    LEFT_OUT = (
        "A search for a wrong site limits how many sites are fused.",
        "Unset `INDUCTOR_FUSIONS_MAX`, or end torch's compiler bisector.",
    )
    RAISED = (
        "The fusion, or the compile with it, raised an exception. The site runs unfused.",
        "Report it. The log has the exception; `INDUCTOR_FUSIONS_STRICT=1` raises it.",
    )
    NEAR_MISS = (
        "The graph almost matches a search function; the message says where it differs.",
        "Write the model as the search function does.",
    )
    OTHER = (
        "A fusion of another package rejected the site, with a message but no code.",
        "See the documentation of that package.",
    )
    # -- attention
    NO_PRODUCT = (
        "The softmax does not follow a matrix product of queries and keys, or no product with values "
        "follows it.",
        "Nothing, if this is not attention. Otherwise compute the scores as one matrix product, and "
        "multiply the weights by v with another.",
    )
    IN_BETWEEN = (
        "An operation between the two products of the attention is not supported.",
        "Move the operation before the first product or after the second.",
    )
    MASK = (
        "A mask or a bias of the scores is not proved to be one that a kernel supports.",
        "Apply one boolean mask with `masked_fill(~mask, -inf)` directly before the softmax.",
    )
    SCALE = (
        "The scores are scaled in an unsupported way: only in part, with rounding, or by a tensor "
        "after a mask or a bias.",
        "Scale the queries instead, by a number or by a tensor.",
    )
    SINK = (
        "A column is concatenated to the scores, but not in the form of an attention sink.",
        "Concatenate one column directly before the softmax, and drop it directly after.",
    )
    WEIGHTS = (
        "The attention weights are returned or read again, and a fused kernel never writes them to memory.",
        "Do not request the weights where they are not needed: `output_attentions=False`, "
        "`need_weights=False`.",
    )
    DROPOUT = (
        "Dropout is applied to the scores, is applied twice, or has the probability 1.",
        "Apply one dropout with p < 1 to the weights, between the softmax and the product with v.",
    )
    RANDOM = (
        "`torch._inductor.config.fallback_random` asks for eager's random numbers; a fused dropout "
        "draws others.",
        "Set `torch._inductor.config.fallback_random = False`, its default.",
    )
    EMPTY_ROWS = (
        "A row may be fully masked (its query sees no key), and the fused kernel may not return "
        "eager's values for it.",
        "Use `INDUCTOR_FUSIONS_EMPTY_ROWS=keep`, the default, or a boolean mask that leaves at least one key "
        "to each query.",
    )
    NO_KERNEL = (
        "This is attention, but no fused kernel supports its dtype, head dim, strides or mask.",
        "See the message. Supported are head dims up to 256 that are multiples of 8, and a bias of "
        "the dtype of q.",
    )
    CHOSEN = (
        "The model already calls SDPA or flex attention, and no rewrite of the call is proved to be faster.",
        "Nothing. A mask that is built inside the compiled function can be simplified.",
    )
    # -- linears, adapters, interactions
    NO_BASE = (
        "Two products look like an adapter, but their result is not added to a linear in this graph.",
        "Nothing, if this is not an adapter. Otherwise compute `linear(x) + scale * (x @ A) @ B` in "
        "one graph.",
    )
    NO_MATRIX = (
        "The adapter belongs to an embedding or a convolution, or the gated product to convolutions. Only "
        "linears are fused.",
        "Nothing. Stock compiles this layer.",
    )
    BEHIND_ADAPTER = (
        "The adapter's result is masked, multiplied or divided by a tensor before it is added to the base, "
        "in an unsupported form. Supported are factors of rows or columns, and DoRA as PEFT writes it.",
        "Apply the factor to the whole sum, or to the low-rank result between A and B.",
    )
    MERGED = (
        "The weight of a linear is computed in each step, as with a merged adapter, in a form that two "
        "products do not replace.",
        "Compute `linear(x, w) + scale * linear(linear(x, a), b)`, if the formula allows it.",
    )
    TERMS = (
        "The sum has an unsupported term or factor beside the base and the adapters.",
        "Add at most one other term. It needs the shape of the result and no scale factor.",
    )
    INPUTS = (
        "The gate and the up projection are linears of different inputs, so one kernel saves no reads.",
        "Nothing.",
    )
    ACTIVATION = (
        "The gate, or the linear that it multiplies, passes through a function that no kernel supports.",
        "Use silu, gelu, relu, its square, or sigmoid on the gate and nothing else, not even a clamp.",
    )
    NORM = (
        "The norm in front of linears of a few rows is another one than the kernels of these compute.",
        "Nothing, if the model needs it. Supported is `F.rms_norm`, and what equals it.",
    )
    PAIRS = (
        "The pairwise dot products are not selected by index vectors, or are not of one set of vectors.",
        "Select them as `z[:, i, j]`, with vectors of indices i and j.",
    )
    OUTER_PRODUCT = (
        "A linear reads a flattened outer product, but not that of two vectors for each row: outer products "
        "are summed, scaled, or of more than two factors, or the factors have different rows. Or an "
        "einsum of three tensors or `bilinear` multiplies all at once, or a convolution reads the products, "
        "or the linear sums over their rows.",
        "Nothing, if the model needs it. Supported is `linear((u[:, :, None] * v[:, None, :]).flatten(1))`.",
    )
    LOSS = (
        "The logits are not computed by a linear in this graph, or this form of the loss is not supported.",
        "Use `F.cross_entropy(F.linear(h, w).view(-1, V), labels.view(-1))`, with the linear in the "
        "same graph.",
    )
    GATHERED = (
        "Too few elements are gathered for each element of the index tensor: writing it to memory would "
        "not be faster.",
        "Nothing. Stock computes the index where it is used.",
    )

    def __init__(self, meaning: str, remedy: str) -> None:
        self.meaning, self.remedy = meaning, remedy

    @property
    def code(self) -> str:
        return self.name.lower().replace("_", "-")

    def __call__(self, text: str) -> Said:
        said = Said(text)
        said.reason = self
        return said

    def rejected(self, text: str, hint: str = "") -> Rejected:
        """The exception for a site that is not proved to be correct."""
        return Rejected(self(text), hint)

    def left_to_stock(self, text: str, hint: str = "") -> LeftToStock:
        """The exception for a site that is not expected to be faster."""
        return LeftToStock(self(text), hint)


def like(other: str, text: str) -> str:
    """Another message with the reason of `other`, if it has one."""
    return other.reason(text) if isinstance(other, Said) else text


def code_of(text: str) -> str:
    """The code of a message; that of `OTHER` if the message carries no reason."""
    return (text.reason if isinstance(text, Said) else Reason.OTHER).code


def page() -> str:
    """docs/reasons.md."""
    rows = "\n".join(f"| `{each.code}` | {each.meaning} | {each.remedy} |" for each in Reason)
    return f"{_HEAD}\n| code | meaning | what you can do |\n|---|---|---|\n{rows}\n"


_HEAD = """# Reasons

Each site that is not fused has a code from this list (`Site.code`, also in the JSON of reports) and a message
with the details (`Site.reason`). The verdict is `rejected` if the fusion is not proved to be correct,
`left to stock` if it is not expected to be faster, and `failed` if it raised an exception. A fused site has
no code.

This page is generated from `inductor_fusions/reasons.py`. Releases may add codes; the meaning of a code never
changes. [attention.md](attention.md#what-to-change-if-a-site-is-not-fused),
[projections.md](projections.md#what-to-change-if-a-site-is-not-fused) and
[lora.md](lora.md#what-to-change-if-a-site-is-not-fused) have the cases of each code.
"""
