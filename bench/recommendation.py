"""Models of recommendation from `configs/models/dlrm-*.json`: cases of `python -m inductor_fusions bench`.

`bench.outer_product` and `bench.dot_interaction` measure them at more sizes, and make the tables of a device.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial

import torch

from bench import dot_interaction, interactions, outer_product
from bench.cases import Case, ModuleWork, Work
from bench.common import Json
from bench.model_cases import CONFIGS

#: By how they combine their features.
MODELS: dict[str, type[outer_product.DLRM | dot_interaction.DLRM]] = {
    "outer product": outer_product.DLRM,
    "dot products": dot_interaction.DLRM,
}
#: Sizes that a CPU compiles and runs in seconds.
SMALL = {"width": 4, "sparse": 4, "entries": 50, "hidden": (16, 8)}


def options(interaction: str, small: bool = False) -> Json:
    """Arguments of the model of a configuration; `small` for a CPU."""
    (values,) = (
        read
        for path in sorted(CONFIGS.glob("dlrm-*.json"))
        if (read := json.loads(path.read_text("utf-8")))["interaction"] == interaction
    )
    return {name: values[name] for name in ("width", "sparse", "entries", "hidden")} | (
        SMALL if small else {}
    )


def build(interaction: str, small: bool = False) -> torch.nn.Module:
    """The model of a configuration, in float32."""
    model: torch.nn.Module = MODELS[interaction](**options(interaction, small))
    return model


def work(interaction: str, rows: int, dtype: str, train: bool, small: bool, device: str) -> Work:
    """A model on a device."""
    sparse = options(interaction, small)["sparse"]
    return ModuleWork(
        partial(build, interaction, small),
        None,
        partial(interactions.draw, rows, sparse),
        dtype,
        train,
        device,
    )


def cases(device: str) -> list[Case]:
    """Each model in inference and in training."""
    if device == "cpu":
        return [
            *_cases("outer product", (32,), ("float32",), True),
            *_cases("dot products", (64,), ("float32",), True),
        ]
    wide = _cases("outer product", (2048, 128), ("float32", "bfloat16"), False)
    return [*wide, *_cases("dot products", (8192,), ("bfloat16",), False)]


def _cases(interaction: str, batches: Sequence[int], dtypes: Sequence[str], small: bool) -> list[Case]:
    return [
        Case(
            "models", f"dlrm {interaction} b{rows} {dtype}{' train' if train else ''}", dtype, train,
            partial(work, interaction, rows, dtype, train, small), tf32=dtype == "float32",
        )
        for rows in batches
        for dtype in dtypes
        for train in (False, True)
    ]  # fmt: skip
