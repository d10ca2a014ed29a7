"""Toggles. Each has an environment variable, read when the package is imported.

| name | variable | takes | default |
|---|---|---|---|
| `enabled` | `INDUCTOR_FUSIONS` | 0, 1 | 1 |
| `attention` | `INDUCTOR_FUSIONS_ATTENTION` | 0, 1 | 1 |
| `attention_kernel` | `INDUCTOR_FUSIONS_ATTENTION_KERNEL` | auto, sdpa, flex | auto |
| `qkv` | `INDUCTOR_FUSIONS_QKV` | 0, 1 | 1 |
| `gated_mlp` | `INDUCTOR_FUSIONS_GATED_MLP` | 0, 1 | 1 |
| `linear_epilogue` | `INDUCTOR_FUSIONS_LINEAR_EPILOGUE` | 0, 1 | 1 |
| `policy` | `INDUCTOR_FUSIONS_POLICY` | profitable, always | profitable |
| `empty_rows` | `INDUCTOR_FUSIONS_EMPTY_ROWS` | keep, stock, ignore | keep |
| `strict` | `INDUCTOR_FUSIONS_STRICT` | 0, 1 | 0 |

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

#: "auto" takes the cheapest kernel that computes an attention; "sdpa" and "flex" take that one wherever
#: it can, whatever is measured.
attention_kernel: str = Config(default="auto", env_name_default="INDUCTOR_FUSIONS_ATTENTION_KERNEL")

#: Linears that share an input, and their gradients, to one matrix product.
qkv: bool = Config(default=True, env_name_default="INDUCTOR_FUSIONS_QKV")

#: act(x @ Wg) * (x @ Wu) to one kernel.
gated_mlp: bool = Config(default=True, env_name_default="INDUCTOR_FUSIONS_GATED_MLP")

#: A linear and the activation behind it to one kernel.
linear_epilogue: bool = Config(default=True, env_name_default="INDUCTOR_FUSIONS_LINEAR_EPILOGUE")

#: "profitable" fuses where a measurement says that it pays; "always" fuses whatever is proved.
policy: str = Config(default="profitable", env_name_default="INDUCTOR_FUSIONS_POLICY")

#: Query rows that a finite mask fill hides from every key (left padding). "keep": they get the
#: value of the unfused model (the mean of v) in a fused kernel; "stock": where such rows cannot be
#: ruled out in training, the site stays unfused; "ignore": whatever the kernel gives, the fastest.
empty_rows: str = Config(default="keep", env_name_default="INDUCTOR_FUSIONS_EMPTY_ROWS")

#: An exception in a fusion is raised instead of leaving the site unfused.
strict: bool = Config(default=False, env_name_default="INDUCTOR_FUSIONS_STRICT")


def variables() -> dict[str, tuple[str, ...]]:
    """Every environment variable of the package, with the values that it takes."""
    return {
        "INDUCTOR_FUSIONS": ("0", "1"),
        "INDUCTOR_FUSIONS_ATTENTION": ("0", "1"),
        "INDUCTOR_FUSIONS_ATTENTION_KERNEL": ("auto", "sdpa", "flex"),
        "INDUCTOR_FUSIONS_QKV": ("0", "1"),
        "INDUCTOR_FUSIONS_GATED_MLP": ("0", "1"),
        "INDUCTOR_FUSIONS_LINEAR_EPILOGUE": ("0", "1"),
        "INDUCTOR_FUSIONS_POLICY": ("profitable", "always"),
        "INDUCTOR_FUSIONS_EMPTY_ROWS": ("keep", "stock", "ignore"),
        "INDUCTOR_FUSIONS_STRICT": ("0", "1"),
    }


def check_environment() -> None:
    """Refuse values that are not understood, and warn of variables that do not exist.

    Raises:
        ValueError: names the variable and the values that it takes.
    """
    known = variables()
    for name, takes in known.items():
        value = os.environ.get(name)
        if value is not None and value not in takes:
            raise ValueError(f"{name} takes {' or '.join(takes)}, not {value!r}")
    for name in os.environ:
        if name.startswith("INDUCTOR_FUSIONS") and name not in known:
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.0)
            warnings.warn(
                f"{name} is not a variable of inductor_fusions; the nearest is {near[0]}", stacklevel=3
            )


check_environment()
install_config_module(sys.modules[__name__])
