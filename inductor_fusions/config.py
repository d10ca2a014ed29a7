"""Toggles. Each has an environment variable, read when the package is imported.

| name | variable | takes | default |
|---|---|---|---|
| `enabled` | `INDUCTOR_FUSIONS` | 0, 1 | 1 |
| `attention` | `INDUCTOR_FUSIONS_ATTENTION` | 0, 1 | 1 |
| `attention_kernel` | `INDUCTOR_FUSIONS_ATTENTION_KERNEL` | auto, sdpa, flex, short, row_bias | auto |
| `stock_misfires` | `INDUCTOR_FUSIONS_STOCK_MISFIRES` | 0, 1 | 1 |
| `kernel_defects` | `INDUCTOR_FUSIONS_KERNEL_DEFECTS` | 0, 1 | 1 |
| `qkv` | `INDUCTOR_FUSIONS_QKV` | 0, 1 | 1 |
| `lora` | `INDUCTOR_FUSIONS_LORA` | 0, 1 | 1 |
| `gated_mlp` | `INDUCTOR_FUSIONS_GATED_MLP` | 0, 1 | 1 |
| `linear_epilogue` | `INDUCTOR_FUSIONS_LINEAR_EPILOGUE` | 0, 1 | 1 |
| `flex_backward` | `INDUCTOR_FUSIONS_FLEX_BACKWARD` | 0, 1 | 1 |
| `stored_indices` | `INDUCTOR_FUSIONS_STORED_INDICES` | 0, 1 | 1 |
| `product_diagonal` | `INDUCTOR_FUSIONS_PRODUCT_DIAGONAL` | 0, 1 | 1 |
| `outer_product_linear` | `INDUCTOR_FUSIONS_OUTER_PRODUCT_LINEAR` | 0, 1 | 1 |
| `dot_interaction` | `INDUCTOR_FUSIONS_DOT_INTERACTION` | 0, 1 | 1 |
| `policy` | `INDUCTOR_FUSIONS_POLICY` | profitable, always | profitable |
| `estimate` | `INDUCTOR_FUSIONS_ESTIMATE` | 0, 1 | 1 |
| `empty_rows` | `INDUCTOR_FUSIONS_EMPTY_ROWS` | keep, stock, ignore | keep |
| `strict` | `INDUCTOR_FUSIONS_STRICT` | 0, 1 | 0 |
| `skip` | `INDUCTOR_FUSIONS_SKIP` | names with commas | none |
| `plugins` | `INDUCTOR_FUSIONS_PLUGINS` | 0, 1 | 1 |
| `max` | `INDUCTOR_FUSIONS_MAX` | a number | all |

`inductor_fusions.config.patch(attention=False)` changes them for a region, as with torch's own configs;
as there, a value that is assigned holds for the thread that assigned it.
"""

import difflib
import os
import sys
import typing
import warnings

from ._inductor import Config, install_config_module

if typing.TYPE_CHECKING:
    # install_config_module adds these.
    def patch(*args: typing.Any, **kwargs: typing.Any) -> typing.Any: ...
    def get_config_copy() -> dict[str, typing.Any]: ...


#: Master switch: off, every pass leaves its graph alone.
enabled: bool = Config(default=True, env_name_default="INDUCTOR_FUSIONS")

#: Attention, hand-written or SDPA, to the cheapest kernel that means the same.
attention: bool = Config(default=True, env_name_default="INDUCTOR_FUSIONS_ATTENTION")

#: "auto" takes the cheapest kernel that computes an attention; "sdpa", "flex", "short" and "row_bias" take
#: that one wherever it can, whatever is measured.
attention_kernel: str = Config(default="auto", env_name_default="INDUCTOR_FUSIONS_ATTENTION_KERNEL")

#: Graphs that Inductor's own attention patterns misread are written in a way that they do not.
stock_misfires: bool = Config(default=True, env_name_default="INDUCTOR_FUSIONS_STOCK_MISFIRES")

#: Calls of kernels of torch and cuDNN that are known to be wrong are made in a way that is right.
kernel_defects: bool = Config(default=True, env_name_default="INDUCTOR_FUSIONS_KERNEL_DEFECTS")

#: Linears that share an input, and their gradients, to one matrix product.
qkv: bool = Config(default=True, env_name_default="INDUCTOR_FUSIONS_QKV")

#: Linears with low-rank adapters, and their gradients.
lora: bool = Config(default=True, env_name_default="INDUCTOR_FUSIONS_LORA")

#: act(x @ Wg) * (x @ Wu) to one kernel.
gated_mlp: bool = Config(default=True, env_name_default="INDUCTOR_FUSIONS_GATED_MLP")

#: A linear and the activation behind it to one kernel.
linear_epilogue: bool = Config(default=True, env_name_default="INDUCTOR_FUSIONS_LINEAR_EPILOGUE")

#: The backward of flex attention to matrix products, for wide heads.
flex_backward: bool = Config(default=True, env_name_default="INDUCTOR_FUSIONS_FLEX_BACKWARD")

#: An index that many gathers read is computed once.
stored_indices: bool = Config(default=True, env_name_default="INDUCTOR_FUSIONS_STORED_INDICES")
product_diagonal: bool = Config(default=True, env_name_default="INDUCTOR_FUSIONS_PRODUCT_DIAGONAL")

#: A linear on the flattened outer product of two matrices, without writing the product.
outer_product_linear: bool = Config(default=True, env_name_default="INDUCTOR_FUSIONS_OUTER_PRODUCT_LINEAR")

#: The pairwise dot products of features, without writing the matrix of all of them.
dot_interaction: bool = Config(default=True, env_name_default="INDUCTOR_FUSIONS_DOT_INTERACTION")

#: "profitable" fuses where a measurement says that it pays; "always" fuses whatever is proved.
policy: str = Config(default="profitable", env_name_default="INDUCTOR_FUSIONS_POLICY")

#: What is not measured on a device is estimated from what is measured nearby, and on other devices; off, it
#: is left to stock.
estimate: bool = Config(default=True, env_name_default="INDUCTOR_FUSIONS_ESTIMATE")

#: Query rows that a finite mask fill hides from every key (left padding). "keep": they get the
#: value of the unfused model (the mean of v) in a fused kernel; "stock": where such rows cannot be
#: ruled out in training, the site stays unfused; "ignore": whatever the kernel gives, the fastest.
empty_rows: str = Config(default="keep", env_name_default="INDUCTOR_FUSIONS_EMPTY_ROWS")

#: An exception in a fusion is raised instead of leaving the site unfused.
strict: bool = Config(default=False, env_name_default="INDUCTOR_FUSIONS_STRICT")

#: Names of fusions that are off, with commas; for those of other packages, which have no toggle here. Entry
#: points of these names are not imported.
skip: str = Config(default="", env_name_default="INDUCTOR_FUSIONS_SKIP")

#: Fusions of other packages; where it is off, none of their code is imported.
plugins: bool = Config(default=True, env_name_default="INDUCTOR_FUSIONS_PLUGINS")

#: Only so many sites of a process are fused, the first ones; None: all. Caches are bypassed.
max: str | None = Config(default=None, env_name_default="INDUCTOR_FUSIONS_MAX")


def variables() -> dict[str, tuple[str, ...]]:
    """Every environment variable of the package, with the values that it takes."""
    return {
        "INDUCTOR_FUSIONS": ("0", "1"),
        "INDUCTOR_FUSIONS_ATTENTION": ("0", "1"),
        "INDUCTOR_FUSIONS_ATTENTION_KERNEL": ("auto", "sdpa", "flex", "short", "row_bias"),
        "INDUCTOR_FUSIONS_STOCK_MISFIRES": ("0", "1"),
        "INDUCTOR_FUSIONS_KERNEL_DEFECTS": ("0", "1"),
        "INDUCTOR_FUSIONS_QKV": ("0", "1"),
        "INDUCTOR_FUSIONS_LORA": ("0", "1"),
        "INDUCTOR_FUSIONS_GATED_MLP": ("0", "1"),
        "INDUCTOR_FUSIONS_LINEAR_EPILOGUE": ("0", "1"),
        "INDUCTOR_FUSIONS_STORED_INDICES": ("0", "1"),
        "INDUCTOR_FUSIONS_PRODUCT_DIAGONAL": ("0", "1"),
        "INDUCTOR_FUSIONS_FLEX_BACKWARD": ("0", "1"),
        "INDUCTOR_FUSIONS_OUTER_PRODUCT_LINEAR": ("0", "1"),
        "INDUCTOR_FUSIONS_DOT_INTERACTION": ("0", "1"),
        "INDUCTOR_FUSIONS_POLICY": ("profitable", "always"),
        "INDUCTOR_FUSIONS_ESTIMATE": ("0", "1"),
        "INDUCTOR_FUSIONS_TABLES": ("a folder",),
        "INDUCTOR_FUSIONS_EMPTY_ROWS": ("keep", "stock", "ignore"),
        "INDUCTOR_FUSIONS_STRICT": ("0", "1"),
        "INDUCTOR_FUSIONS_SKIP": ("names with commas",),
        "INDUCTOR_FUSIONS_PLUGINS": ("0", "1"),
        "INDUCTOR_FUSIONS_MAX": ("a number",),
    }


def check_policy(given: str) -> str:
    """A policy that was given as an argument.

    Raises:
        ValueError: it is none; names those that there are.
    """
    takes = variables()["INDUCTOR_FUSIONS_POLICY"]
    if given not in takes:
        raise ValueError(f"policy takes {' or '.join(takes)}, not {given!r}")
    return given


def check_environment() -> None:
    """Refuse values that are not understood, and warn of variables that do not exist.

    Raises:
        ValueError: names the variable and the values that it takes.
    """
    known = variables()
    for name, takes in known.items():
        value = os.environ.get(name)
        if value is not None and not _takes(takes, value):
            raise ValueError(f"{name} takes {' or '.join(takes)}, not {value!r}")
    for name in os.environ:
        if name.startswith("INDUCTOR_FUSIONS") and name not in known:
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.0)
            warnings.warn(
                f"{name} is not a variable of inductor_fusions; the nearest is {near[0]}", stacklevel=3
            )


def _takes(takes: tuple[str, ...], value: str) -> bool:
    if takes == ("a number",):
        return value.isdecimal()
    return value in takes or takes in (("names with commas",), ("a folder",))


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


check_environment()
install_config_module(sys.modules[__name__])
