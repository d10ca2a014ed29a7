"""Which kernel a block GEMM gets on a device, and whether it is measured to pay."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from ... import config, tables
from ...fusion import LeftToStock
from . import configurations
from .configurations import Config, suits
from .problem import Problem, describe


@dataclass(frozen=True)
class Choice:
    """What a device gets for a problem.

    Attributes:
        config: the kernel.
        note: for the report: where it comes from.
    """

    config: Config
    note: str


def capability(device: torch.device) -> int:
    """Compute capability as one number: 80, 90, 100."""
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def choose(problem: Problem, device: torch.device) -> Choice:
    """The kernel for a problem.

    Raises:
        LeftToStock: no measurement says that one pays, and the policy asks for that.
    """
    if capability(device) < 80:
        raise LeftToStock("the device is older than compute capability 8.0")
    try:
        return measured(problem, device)
    except LeftToStock:
        if config.policy != "always":
            raise
    return Choice(configurations.default(problem, capability(device)), ", not measured")


def measured(problem: Problem, device: torch.device) -> Choice:
    """What the table of a device says.

    A row counts for its own number of rows; two rows count for those between them where both are faster
    than stock and not further apart than a factor of `tables.BRACKET`.

    Raises:
        LeftToStock: nothing that holds for this problem, or that it does not pay.
    """
    name = tables.device_name(device)
    table = tables.load(name)
    if table is None:
        raise LeftToStock(f"no measurements for the device {name}")
    tokens = problem.tokens
    if tokens is None:
        raise LeftToStock("the number of rows is not known when the kernel is chosen")
    around = tables.bracket([row for row in table.get("block_mm", []) if _matches(row, problem)], tokens)
    if not around:
        raise LeftToStock(f"not measured on {name}: {describe(problem)}")
    gain = min(row["gain"] for row in around)
    if gain < tables.MARGIN or any(row["config"] is None for row in around):
        raise LeftToStock(f"not measured to be faster than stock on {name} at this shape")
    fitting = [row for row in around if suits(Config(**row["config"]), problem)]
    if not fitting:
        raise LeftToStock(f"the kernels that were measured on {name} take other numbers of rows")
    nearest = min(fitting, key=lambda row: abs(math.log2(row["tokens"] / tokens)))
    return Choice(Config(**nearest["config"]), f", {gain:.2f}x measured")


def _matches(row: dict[str, Any], problem: Problem) -> bool:
    return all(row.get(name) == wanted for name, wanted in problem.key.items())
