"""A GPU that is not there."""

from __future__ import annotations

from typing import Any


class Hopper:
    """Triton's driver, for a device that is not there: what a kernel writes to is read from its code."""

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)
