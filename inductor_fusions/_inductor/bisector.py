"""Sites as a subsystem of torch's compiler bisector."""

from __future__ import annotations

import sys
from collections.abc import Callable

#: Our part of Inductor, as torch's compiler bisector calls it.
BISECTED = "inductor_fusions"


def join_bisector() -> None:
    """Let torch's compiler bisector try Inductor without some of the fused sites, before anything else."""
    from torch._inductor import compiler_bisector as bisector

    parts = bisector.BACKENDS["inductor"]
    if not any(part.name == BISECTED for part in parts):
        parts.insert(0, bisector.BisectSubsystem(BISECTED))


def bisecting() -> bool:
    """Whether torch's compiler bisector looks for one of our sites now."""
    bisector = sys.modules.get("torch._inductor.compiler_bisector")
    if bisector is None or not bisector.CompilerBisector.bisection_enabled:
        return False
    return bool(bisector.CompilerBisector.get_subsystem() == BISECTED)


def bisected_away(describe: Callable[[], str]) -> bool:
    """Whether torch's compiler bisector wants this site unfused."""
    if not bisecting():
        return False
    from torch._inductor.compiler_bisector import CompilerBisector

    return bool(CompilerBisector.disable_subsystem("inductor", BISECTED, describe))
