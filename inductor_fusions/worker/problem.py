"""The rows of a problem, from measurements of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager

from ..decisions.problems import SECTIONS, Row
from . import attention, linears
from .case import Case, UnableError
from .measuring import best, gains

#: For each section: the function that builds the problem of a row.
CASES: Mapping[str, Callable[[Row, str], Case]] = {
    "block_mm": linears.products,
    "lora": linears.adapted,
    "lora_sums": linears.added,
    "narrow_mm": linears.narrow,
    "outer_product_linear": linears.outer_product,
}


def rows_of(
    section: str, row: Row, kernels: Sequence[str], device: str, alone: AbstractContextManager[None]
) -> dict[str, list[Row]]:
    """The rows of a problem and of the kernel whose tiles were tried for it, by section.

    Args:
        alone: entered once, while the device is used to compare and to time.

    Raises:
        UnableError: its columns do not determine it, or no kernel supports it.
        NotFusedError: nothing was fused.
    """
    SECTIONS[section].check(row, is_problem=True)
    if section == "attention":
        by_kernel = gains(attention.case(row, device), kernels, device, alone)
        if not by_kernel:
            raise UnableError(f"none of {', '.join(kernels)} supports it")
        return {section: [{**row, "gain": by_kernel}]}
    if section not in CASES:
        raise UnableError(f"{section} has no test cases")
    case = CASES[section](row, device)
    gain, made_of = best(case, device, alone)
    # Kernels whose tiles were not tried are left out: measured by themselves, they may have better ones.
    found: dict[str, list[Row]] = {name: made_of[name] for name in (section, case.varied) if name in made_of}
    if "block_mm" in found:
        # A grouped GEMM of a linear with adapters has no gain of its own, but a place for it.
        found["block_mm"] = [{**each, "gain": gain} for each in found["block_mm"]]
    key = SECTIONS[section].key(row)
    own = [each for each in found.get(section, ()) if SECTIONS[section].key(each) == key]
    found[section] = [{**each, "gain": gain} for each in own or [dict(row)]]
    return found
