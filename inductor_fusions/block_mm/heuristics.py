"""Chooses the kernel of a grouped GEMM on a device, and whether it is profitable."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..decisions import Decision, Query, Span, asked, configured, decide_for_all, hardware, tiles
from ..decisions.problems import SECTIONS, Row
from ..operands import check_capability
from ..reasons import Reason
from . import configurations, cost
from .configurations import Config, suits
from .problem import Problem, describe


def capability(device: torch.device) -> int:
    """Compute capability as one number: 80, 90, 100."""
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def decided(problem: Problem, device: torch.device, span: Span | None = None) -> Decision:
    """The decision for a problem on a device.

    Args:
        span: of a symbolic number of rows.

    Raises:
        LeftToStock: the device is too old for any kernel.
    """
    check_capability(device)
    tokens = span if problem.tokens is None and problem.kind != "shared_b" else problem.tokens
    if tokens is not None and not _has_sizes(problem):
        return Decision(None, reason=Reason.SYMBOLIC("a size other than the number of rows is symbolic"))
    return decide_for_all(_query(problem), tokens, device)


def choose(problem: Problem, device: torch.device, tokens: int | None = None) -> Config:
    """The configuration of the nearest measured problem that fits, or one that should be faster.

    Args:
        tokens: for how many it is decided, where their number is symbolic.

    Raises:
        LeftToStock: the device is too old for any.
    """
    check_capability(device)
    arch, tokens = capability(device), problem.tokens or tokens
    if tokens is None or not _has_sizes(problem):
        return configurations.default(problem, arch)
    query = _query(problem).at(tokens)
    rows: list[Row] = []

    def fits(row: Row) -> Config | None:
        # The code of another number of products takes other registers.
        if len(row["n"]) != len(problem.columns) or len(row["layout"]) != len(problem.layouts):
            return None
        read = Config(**row["config"])
        rows.append(row)
        return read if suits(read, problem) and configurations.fits(read, problem, arch) else None

    nearest = tiles(query, device, fits)
    found = nearest or configurations.default(problem, arch)
    if nearest is None or not SECTIONS["block_mm"].is_same(rows[-1], query.row):
        found = asked(_faster, found, problem, device)
    return configured("block_mm", query.row, found, lambda: candidates(problem, device))


def candidates(problem: Problem, device: torch.device) -> list[Config]:
    """Configurations worth measuring, those that should be fastest first."""
    found, time = configurations.candidates(problem, capability(device)), _model(problem, device)
    return found if time is None else sorted(found, key=time)


def _faster(usual: Config, problem: Problem, device: torch.device) -> Config:
    """The configuration that should be fastest, if it should be much faster than the usual one."""
    time = _model(problem, device)
    if time is None:
        return usual
    best = min(configurations.candidates(problem, capability(device)), key=time)
    return usual if time(usual) <= cost.DOUBT * time(best) else best


def _model(problem: Problem, device: torch.device) -> Callable[[Config], float] | None:
    """The expected microseconds of a configuration; None if nothing is known of such problems."""
    properties = hardware(device)
    if properties is None or not cost.is_modelled(problem, capability(device)):
        return None
    processors = properties.multiprocessors
    return lambda choice: cost.microseconds(choice, problem, processors)


def _has_sizes(problem: Problem) -> bool:
    """Whether all sizes are numbers but that of the tokens."""
    return None not in (problem.rows if problem.kind == "shared_b" else problem.inner)


def _query(problem: Problem) -> Query:
    return Query("block_mm", problem.key, text=describe(problem))
