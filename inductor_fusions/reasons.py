"""The closed list of reasons: why a site is not fused, what that means, and what one can do.

A guard says a reason in words, by calling a member: `Rejected(Reason.DTYPE("a result of dtype float64"))`.
What it gives is the text, which carries the reason; so it can be handed on as any other text.
"""

from __future__ import annotations

from enum import Enum


class Said(str):
    """A reason in the words of one site.

    Attributes:
        reason: which one it is.
    """

    reason: Reason


class Reason(Enum):
    """Why a site is not fused.

    Attributes:
        code: its name in reports: lower case, with hyphens.
        meaning: what is the case.
        remedy: what one can do.
    """

    # -- every fusion
    DEVICE = (
        "There is no kernel for the device, or none that would be faster there.",
        "Nothing on a CPU: its libraries are as fast. On CUDA, a device of compute capability 8.0 or later.",
    )
    DTYPE = (
        "There is no kernel for the dtype of an operand or of the result.",
        "bfloat16 or float16; where the kernels take it, float32.",
    )
    MIXED_DTYPES = (
        "Operands have dtypes that no kernel takes together, or autocast would round them.",
        "Give them one dtype. Adapters may be float32 where the base is bfloat16.",
    )
    TF32 = (
        "float32 is multiplied exactly, which the library does as fast.",
        '`torch.set_float32_matmul_precision("high")`, if TF32 is exact enough.',
    )
    LAYOUT = (
        "A matrix lies in memory in a way that no kernel reads or writes: strides, alignment, or order.",
        "Sizes that are multiples of 16 bytes; `contiguous()` where a view is strided in both directions.",
    )
    SHAPES = (
        "Shapes do not fit each other, or something is broadcast where the kernel has one value for each.",
        "Give the operands the shape of the result.",
    )
    SYMBOLIC = (
        "A size is symbolic, and no decision is right for all that it may be.",
        "Compile with `dynamic=False`, or mark the other dims as dynamic alone.",
    )
    EMPTY = (
        "An operand is empty, or may be.",
        "`torch._check(n > 0)` in front of it where the size is symbolic.",
    )
    LIMIT = (
        "There are more of them, or they are larger, than one kernel takes.",
        "Nothing in general: fewer adapters in one sum, lower ranks, fewer features.",
    )
    NOT_A_TENSOR = (
        "An argument that has to be a tensor, a number or a mask is something else.",
        "Give the operation a tensor where it takes one, and a number where it takes a number.",
    )
    USED_ELSEWHERE = (
        "A value that the kernel would not write is read by something else as well.",
        "Let the named operation alone read it. In training, a backward may be what reads it.",
    )
    OVERWRITTEN = (
        "Memory that is read, or that is kept for the backward, is written to.",
        "Write out of place, or before the first of the operations.",
    )
    MODE = (
        "Gradients or autocast are switched on or off between the operations.",
        "Enter and leave the mode around all of them.",
    )
    TRANSFORM = (
        "A transform of torch.func, or a derivative beyond the first, which the fused operation has not.",
        "Compile what the transform is applied to by itself, or leave this graph to stock.",
    )
    SUBCLASS = (
        "An operand is a tensor around tensors, such as a DTensor.",
        "Let the function see local tensors, as ColwiseParallel gives them by default.",
    )
    ORDER = (
        "One operation cannot stand for several: a result is needed before all operands are there.",
        "Compute the linears on one input next to each other.",
    )
    MEMORY = (
        "The results together would need more memory at the peak than one after the other.",
        "Nothing: it is what keeps the peak where it is.",
    )
    ROUNDED = (
        "A value is rounded on its way to less than its operands and the result have.",
        "Cast in front of the first operation, or behind the last.",
    )
    RANGE = (
        "A number is too large, too low or not finite for the kernel to give what eager gives.",
        "Scale operands, or mask with the lowest number of the dtype.",
    )
    NOT_MEASURED = (
        "Nothing is measured for this device, or near this shape.",
        "`python -m inductor_fusions tune run SCRIPT` measures it, as `INDUCTOR_FUSIONS_MEASURE=1` does; "
        "`INDUCTOR_FUSIONS_POLICY=always` fuses what is proved.",
    )
    NOT_FASTER = (
        "Stock's kernels are as fast, or faster, as measured or estimated.",
        "Nothing. `INDUCTOR_FUSIONS_POLICY=always` fuses it all the same, to compare.",
    )
    EAGER_BITS = (
        "The bits of eager are asked for, and a fused kernel rounds otherwise.",
        "Leave `torch._inductor.config.numerics` as it is by default.",
    )
    LEFT_OUT = (
        "Those who look for a wrong site have asked for fewer.",
        "Unset `INDUCTOR_FUSIONS_MAX`; end torch's bisector.",
    )
    RAISED = (
        "The fusion, or the compile with it, raised an error. The site runs unfused.",
        "Report it: the log has the error, and `INDUCTOR_FUSIONS_STRICT=1` raises it.",
    )
    NEAR_MISS = (
        "It is nearly what a fusion by two functions looks for, and differs where the text says.",
        "Write it as the function does.",
    )
    OTHER = (
        "A fusion of another package gave the reason, in words alone.",
        "See what that package says.",
    )
    # -- attention
    NO_PRODUCT = (
        "No product of queries and keys is found above the softmax, or none with values below.",
        "Nothing, if it is no attention. Else let scores be one product, and weights be multiplied by v.",
    )
    IN_BETWEEN = (
        "An operation stands between the two products that no kernel has.",
        "Move it in front of the products or behind them.",
    )
    MASK = (
        "What masks the scores, or is added to them, is not proved to be what a kernel takes.",
        "A boolean mask with `masked_fill(~mask, -inf)`, once, in front of the softmax.",
    )
    SCALE = (
        "The scores are scaled in a way that no kernel takes: by a tensor of them, or behind a mask.",
        "Scale the queries, by a number or a tensor.",
    )
    SINK = (
        "A column beside the scores is used otherwise than an attention sink.",
        "One column, concatenated in front of the softmax and dropped behind it.",
    )
    WEIGHTS = (
        "The attention weights themselves are used, which no fused kernel writes.",
        "Do not ask for them where they are not needed.",
    )
    DROPOUT = (
        "Dropout is where no kernel has it, or with a probability that is none.",
        "One dropout of the weights, between the softmax and v.",
    )
    RANDOM = (
        "Random numbers are asked for as eager draws them, which a kernel does otherwise.",
        "Leave `torch._inductor.config.fallback_random` off.",
    )
    EMPTY_ROWS = (
        "A query may see no key, and what eager gives for it is asked for.",
        "`INDUCTOR_FUSIONS_EMPTY_ROWS=keep`; or a mask that leaves each query a key.",
    )
    NO_KERNEL = (
        "No fused kernel takes this attention, by its dtype, head dim, strides or mask.",
        "The text says which. Head dims of 256 at most, as multiples of 8; a bias of the dtype of q.",
    )
    CHOSEN = (
        "It is a call of SDPA or flex attention already, and nothing is proved that would make it faster.",
        "Nothing. A mask that is made in the compiled function may go away by proof.",
    )
    # -- linears, adapters, interactions
    NO_BASE = (
        "Nothing is added to two products in a row that look like an adapter, or not to their result.",
        "Nothing, if it is no adapter. Else add `scale * (x @ A) @ B` to the linear.",
    )
    NO_MATRIX = (
        "What the adapter is added to is no matrix product: an embedding or a convolution.",
        "Nothing: it is left to stock.",
    )
    BEHIND_ADAPTER = (
        "The result of an adapter passes something else before it is added.",
        "Multiply what is added to as well, or the narrow result between A and B.",
    )
    TERMS = (
        "The sum has terms beside products and adapters that the kernel does not take.",
        "One term beside them, of the shape of the result and without a factor.",
    )
    INPUTS = (
        "The gate and what it multiplies are linears of different inputs.",
        "Nothing: they share nothing to read.",
    )
    ACTIVATION = (
        "The gate, or what it multiplies, passes a function that no kernel has.",
        "silu, gelu, relu or sigmoid of the gate, and nothing else: no clamps.",
    )
    PAIRS = (
        "Which pairs of the features are read is not what the kernel takes.",
        "`z[:, i, j]` with vectors of indices i and j.",
    )
    LOSS = (
        "The logits of a loss are not a linear's, or the loss is none that the operation computes.",
        "`F.cross_entropy(F.linear(h, w).view(-1, V), labels.view(-1))`, with the linear in the same graph.",
    )
    GATHERED = (
        "An index is read too often, for its size, to be written to memory first.",
        "Nothing: it is computed where it is read.",
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


def like(other: str, text: str) -> str:
    """Other words for the reason that a text carries."""
    return other.reason(text) if isinstance(other, Said) else text


def code_of(text: str) -> str:
    """The code of a reason in words; that of `OTHER` where it says none."""
    return (text.reason if isinstance(text, Said) else Reason.OTHER).code


def page() -> str:
    """docs/reasons.md."""
    rows = "\n".join(f"| `{each.code}` | {each.meaning} | {each.remedy} |" for each in Reason)
    return f"{_HEAD}\n| code | what is the case | what one can do |\n|---|---|---|\n{rows}\n"


_HEAD = """# Reasons

A site that is not fused has a reason: a code from this list (`Site.code`, and in the JSON of reports), and a
text with its details (`Site.reason`). The verdict says what it means for the site: "rejected" where it is not
proved that fusing is right, "left to stock" where it would not pay, "failed" where something raised. A fused
site has no code.

The list is that of `inductor_fusions/reasons.py`; codes may be added, and none changes its meaning.
"""
