"""Settings. Each has an environment variable, which is read when the package is imported.

`enabled` is set by `INDUCTOR_FUSIONS`, each other entry by `INDUCTOR_FUSIONS_` and its name.
`inductor_fusions.config.patch(attention=False)` changes entries for a region, as with torch's own configs;
as there, a value that is assigned holds for the thread that assigned it.
"""

import sys
import typing

from ._inductor import Config, install_config_module
from .variables import check, choice, switch, text, variables

if typing.TYPE_CHECKING:
    # install_config_module adds these.
    def patch(*args: typing.Any, **kwargs: typing.Any) -> typing.Any: ...
    def get_config_copy() -> dict[str, typing.Any]: ...


#: Master switch: off, every pass leaves its graph alone.
enabled: bool = Config(default=switch("INDUCTOR_FUSIONS", True))

#: Attention, hand-written or SDPA, to the cheapest kernel that means the same.
attention: bool = Config(default=switch("INDUCTOR_FUSIONS_ATTENTION", True))

#: "auto" takes the cheapest kernel that computes an attention; "sdpa", "flex", "short", "row_bias" and
#: "decode" take that one wherever it can, whatever is measured.
attention_kernel: str = Config(
    default=choice("INDUCTOR_FUSIONS_ATTENTION_KERNEL", "auto", "sdpa", "flex", "short", "row_bias", "decode")
)

#: Graphs that Inductor's own attention patterns misread are written in a way that they do not.
stock_misfires: bool = Config(default=switch("INDUCTOR_FUSIONS_STOCK_MISFIRES", True))

#: Calls of kernels of torch and cuDNN that are known to be wrong are made in a way that is right.
kernel_defects: bool = Config(default=switch("INDUCTOR_FUSIONS_KERNEL_DEFECTS", True))

#: Linears that share an input, and their gradients, to one matrix product.
qkv: bool = Config(default=switch("INDUCTOR_FUSIONS_QKV", True))

#: Linears with low-rank adapters, and their gradients.
lora: bool = Config(default=switch("INDUCTOR_FUSIONS_LORA", True))

#: act(x @ Wg) * (x @ Wu) to one kernel.
gated_mlp: bool = Config(default=switch("INDUCTOR_FUSIONS_GATED_MLP", True))

#: A linear and the activation behind it to one kernel.
linear_epilogue: bool = Config(default=switch("INDUCTOR_FUSIONS_LINEAR_EPILOGUE", True))

#: The backward of flex attention to matrix products, for wide heads.
flex_backward: bool = Config(default=switch("INDUCTOR_FUSIONS_FLEX_BACKWARD", True))

#: An index that many gathers read is computed once.
stored_indices: bool = Config(default=switch("INDUCTOR_FUSIONS_STORED_INDICES", True))

#: The diagonal of a matrix product as dot products, without the other elements.
product_diagonal: bool = Config(default=switch("INDUCTOR_FUSIONS_PRODUCT_DIAGONAL", True))

#: A linear on the flattened outer product of two matrices, without writing the product.
outer_product_linear: bool = Config(default=switch("INDUCTOR_FUSIONS_OUTER_PRODUCT_LINEAR", True))

#: The pairwise dot products of features, without writing the matrix of all of them.
dot_interaction: bool = Config(default=switch("INDUCTOR_FUSIONS_DOT_INTERACTION", True))

#: A loss and the linear that makes its logits, without having all logits in memory.
linear_cross_entropy: bool = Config(default=switch("INDUCTOR_FUSIONS_LINEAR_CROSS_ENTROPY", True))

#: Logits that a graph returns beside their loss. "differentiable": as in stock, to which the loss is left;
#: "detached": the caller does not differentiate them, and they take no gradient where the loss is fused.
returned_logits: str = Config(
    default=choice("INDUCTOR_FUSIONS_RETURNED_LOGITS", "differentiable", "detached")
)

#: "profitable" fuses where a measurement says that it pays; "always" fuses whatever is proved.
policy: str = Config(default=choice("INDUCTOR_FUSIONS_POLICY", "profitable", "always"))

#: What is not measured on a device is estimated from what is measured nearby, and on other devices; off, it
#: is left to stock.
estimate: bool = Config(default=switch("INDUCTOR_FUSIONS_ESTIMATE", True))

#: What is far from everything that was measured is measured on this machine while it is compiled, and kept
#: for later processes; off, it is left to stock.
measure: bool = Config(default=switch("INDUCTOR_FUSIONS_MEASURE", False))

#: Seconds that a process measures at most.
measure_budget: str = Config(default=text("INDUCTOR_FUSIONS_MEASURE_BUDGET", "a number") or "60")

#: Query rows that a finite mask fill hides from every key (left padding). "keep": they get the
#: value of the unfused model (the mean of v) in a fused kernel; "stock": where such rows cannot be
#: ruled out in training, the site stays unfused; "ignore": whatever the kernel gives, the fastest.
empty_rows: str = Config(default=choice("INDUCTOR_FUSIONS_EMPTY_ROWS", "keep", "stock", "ignore"))

#: An exception in a fusion is raised instead of leaving the site unfused.
strict: bool = Config(default=switch("INDUCTOR_FUSIONS_STRICT", False))

#: Names of fusions that are off, with commas; for those of other packages, which have no toggle here. Entry
#: points of these names are not imported.
skip: str = Config(default=text("INDUCTOR_FUSIONS_SKIP", "names with commas") or "")

#: Fusions of other packages; where it is off, none of their code is imported.
plugins: bool = Config(default=switch("INDUCTOR_FUSIONS_PLUGINS", True))

#: Only so many sites of a process are fused, the first ones; None: all. Caches are bypassed.
max: str | None = Config(default=text("INDUCTOR_FUSIONS_MAX", "a number"))


def check_policy(given: str) -> str:
    """A policy that was given as an argument.

    Raises:
        ValueError: it is none; names those that there are.
    """
    takes = variables()["INDUCTOR_FUSIONS_POLICY"]
    if given not in takes:
        raise ValueError(f"policy must be {' or '.join(takes)}, not {given!r}")
    return given


def toggle_of(fusion: str) -> str:
    """The entry that switches a fusion; "" for those of other packages, which `skip` alone switches."""
    name = {"lora_input": "lora"}.get(fusion, fusion)  # one toggle for what is done before and after autograd
    return name if f"INDUCTOR_FUSIONS_{name.upper()}" in variables() else ""


def is_on(fusion: str) -> bool:
    """Whether a fusion runs: neither the master switch, nor its own toggle, nor `skip` has it off."""
    this = sys.modules[__name__]
    return bool(this.enabled and getattr(this, toggle_of(fusion), True) and fusion not in skipped())


def skipped() -> frozenset[str]:
    """The names in `skip`."""
    return frozenset(name.strip() for name in str(sys.modules[__name__].skip).split(",")) - {""}


def most_sites() -> int | None:
    """How many sites of this process may be fused, or None for all."""
    count = sys.modules[__name__].max
    return None if count is None else int(count)


#: Of `tables`, which reads it with the first table.
text("INDUCTOR_FUSIONS_TABLES", "a folder")
check()
install_config_module(sys.modules[__name__])
