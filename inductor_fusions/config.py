"""Settings. Each has an environment variable, which is read when the package is imported.

`enabled` is set by `INDUCTOR_FUSIONS`, each other entry by `INDUCTOR_FUSIONS_` and its name.
`inductor_fusions.config.patch(attention=False)` changes entries in a `with` block or a decorated function.
As with torch's own configs, an assigned value is local to the thread that assigned it.
"""

import sys
import typing

from ._inductor import Config, install_config_module
from .variables import check, check_assigned, choice, number, switch, text, variables

if typing.TYPE_CHECKING:
    # install_config_module adds these.
    def patch(*args: typing.Any, **kwargs: typing.Any) -> typing.Any: ...
    def get_config_copy() -> dict[str, typing.Any]: ...


#: Master switch. Off: no pass changes a graph.
enabled: bool = Config(default=switch("INDUCTOR_FUSIONS", True))

#: Fuse attention, hand-written or an SDPA call, to the fastest equivalent kernel.
attention: bool = Config(default=switch("INDUCTOR_FUSIONS_ATTENTION", True))

#: "auto": the kernel that is measured to be the fastest. "sdpa", "flex", "short", "row_bias", "decode": that
#: kernel wherever it supports the attention, whatever was measured.
attention_kernel: str = Config(
    default=choice("INDUCTOR_FUSIONS_ATTENTION_KERNEL", "auto", "sdpa", "flex", "short", "row_bias", "decode")
)

#: Rewrite graphs that Inductor's own attention patterns misread to equivalent ones that they do not match.
stock_misfires: bool = Config(default=switch("INDUCTOR_FUSIONS_STOCK_MISFIRES", True))

#: Avoid kernels of torch and cuDNN in calls for which they are known to be wrong.
kernel_defects: bool = Config(default=switch("INDUCTOR_FUSIONS_KERNEL_DEFECTS", True))

#: Fuse linears that share an input, and their gradients, to one matrix product.
qkv: bool = Config(default=switch("INDUCTOR_FUSIONS_QKV", True))

#: Fuse linears with low-rank adapters, and their gradients.
lora: bool = Config(default=switch("INDUCTOR_FUSIONS_LORA", True))

#: Fuse act(x @ Wg) * (x @ Wu) to one kernel.
gated_mlp: bool = Config(default=switch("INDUCTOR_FUSIONS_GATED_MLP", True))

#: Fuse a linear and the activation after it to one kernel, and linears of up to 16 rows.
linear_epilogue: bool = Config(default=switch("INDUCTOR_FUSIONS_LINEAR_EPILOGUE", True))

#: Apply an RMSNorm in the kernels of the linears of one row that read it.
norm_linear: bool = Config(default=switch("INDUCTOR_FUSIONS_NORM_LINEAR", True))

#: Compute the backward of flex attention by library GEMMs, for wide heads.
flex_backward: bool = Config(default=switch("INDUCTOR_FUSIONS_FLEX_BACKWARD", True))

#: Store an index tensor that gathers read many times, instead of computing it for each element.
stored_indices: bool = Config(default=switch("INDUCTOR_FUSIONS_STORED_INDICES", True))

#: Compute only the diagonal of a matrix product, if nothing else of it is read.
product_diagonal: bool = Config(default=switch("INDUCTOR_FUSIONS_PRODUCT_DIAGONAL", True))

#: Fuse a linear on a flattened outer product of two matrices, without materialising the outer product.
outer_product_linear: bool = Config(default=switch("INDUCTOR_FUSIONS_OUTER_PRODUCT_LINEAR", True))

#: Compute pairwise dot products of features, without materialising all of them.
dot_interaction: bool = Config(default=switch("INDUCTOR_FUSIONS_DOT_INTERACTION", True))

#: Fuse a loss with the linear that computes its logits, without materialising all logits.
linear_cross_entropy: bool = Config(default=switch("INDUCTOR_FUSIONS_LINEAR_CROSS_ENTROPY", True))

#: If a graph returns logits beside their loss: "differentiable": the loss is left to stock. "detached": the
#: caller declares not to differentiate the logits; the loss is fused, and they get no gradient.
returned_logits: str = Config(
    default=choice("INDUCTOR_FUSIONS_RETURNED_LOGITS", "differentiable", "detached")
)

#: "profitable": fuse if measurements show a gain. "always": fuse whatever is proved to be correct.
policy: str = Config(default=choice("INDUCTOR_FUSIONS_POLICY", "profitable", "always"))

#: Estimate the gain of shapes that were not measured on this device, from similar shapes and other devices.
#: Off: such shapes are left to stock.
estimate: bool = Config(default=switch("INDUCTOR_FUSIONS_ESTIMATE", True))

#: During a compile, measure shapes that are far from every measurement, and keep the results for later
#: processes. Off: such shapes are left to stock.
measure: bool = Config(default=switch("INDUCTOR_FUSIONS_MEASURE", False))

#: The most seconds that a process spends on measuring, as text; None: no limit.
measure_budget: str | None = Config(default=number("INDUCTOR_FUSIONS_MEASURE_BUDGET") or "60")

#: Fully masked rows under a finite fill (left padding). "keep": a fused kernel gives them the value of the
#: unfused model, the mean of v. "stock": in training, a site that may have such rows is not fused. "ignore":
#: their result is undefined, which is the fastest.
empty_rows: str = Config(default=choice("INDUCTOR_FUSIONS_EMPTY_ROWS", "keep", "stock", "ignore"))

#: Raise an exception of a fusion, instead of leaving its site unfused.
strict: bool = Config(default=switch("INDUCTOR_FUSIONS_STRICT", False))

#: Comma-separated names of fusions that are off, also those of other packages, which have no entry.
#: Entry points of these names are not imported.
skip: str = Config(default=text("INDUCTOR_FUSIONS_SKIP", "comma-separated names") or "")

#: Run fusions of other packages. Off: none of their code is imported.
plugins: bool = Config(default=switch("INDUCTOR_FUSIONS_PLUGINS", True))

#: Fuse only this many sites of the process, the first ones, and bypass caches; None: all.
max: str | None = Config(default=number("INDUCTOR_FUSIONS_MAX"))


def check_policy(given: str) -> str:
    """Check a policy that was passed as an argument.

    Raises:
        ValueError: it is not a policy; the message names the valid ones.
    """
    check_assigned("INDUCTOR_FUSIONS_POLICY", given, "policy")
    return given


def always() -> bool:
    """Whether the policy is to fuse whatever is proved to be correct, not only what pays."""
    return bool(sys.modules[__name__].policy == "always")


def variable_of(entry: str) -> str:
    """The environment variable of an entry."""
    return "INDUCTOR_FUSIONS" if entry == "enabled" else f"INDUCTOR_FUSIONS_{entry.upper()}"


def toggle_of(fusion: str) -> str:
    """The entry that switches a fusion; "" for fusions of other packages, which only `skip` switches."""
    name = {"lora_input": "lora"}.get(fusion, fusion)  # one toggle for what is done before and after autograd
    return name if variable_of(name) in variables() else ""


def is_on(fusion: str) -> bool:
    """Whether a fusion runs: the master switch and its own entry are on, and `skip` does not name it."""
    this = sys.modules[__name__]
    return bool(this.enabled and getattr(this, toggle_of(fusion), True) and fusion not in skipped())


def skipped() -> frozenset[str]:
    """The names in `skip`."""
    return frozenset(name.strip() for name in str(sys.modules[__name__].skip).split(",")) - {""}


def most_sites() -> int | None:
    """The number of sites of this process that may be fused (`max`), or None for all."""
    count = sys.modules[__name__].max
    return None if count is None else int(count)


#: Read by `decisions.tables`, with the first table.
text("INDUCTOR_FUSIONS_TABLES", "a folder")
check()
install_config_module(sys.modules[__name__])


# A pass that meets an invalid value would fail a compile, so assignments are checked as variables are.
_plain: typing.Any = type(sys.modules[__name__])


def _check(entry: str, value: object) -> None:
    if variable_of(entry) in variables():
        check_assigned(variable_of(entry), value, f"config.{entry}")


class _Checked(_plain):  # type: ignore[misc]  # the class of this module, which torch makes
    def __setattr__(self, name: str, value: object) -> None:
        _check(name, value)
        _plain.__setattr__(self, name, value)

    def patch(self, arg1: typing.Any = None, arg2: typing.Any = None, **kwargs: typing.Any) -> typing.Any:
        changes = {arg1: arg2} if isinstance(arg1, str) and arg2 is not None else arg1 or kwargs
        for name, value in changes.items() if isinstance(changes, dict) else ():
            _check(name, value)
        return _plain.patch(self, arg1, arg2, **kwargs)


object.__setattr__(sys.modules[__name__], "__class__", _Checked)
