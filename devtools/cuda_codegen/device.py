"""A CUDA device that does not exist, and what answers in its place."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from unittest import mock

from inductor_fusions import _inductor, decisions

Device = _inductor.AbsentDevice


def _device(name: str, gib: int, l2_mib: int) -> Device:
    table, found = decisions.target(name)
    return Device(
        table, found.capability, found.multiprocessors, found.shared_bytes, gib * 2**30, l2_mib * 2**20
    )


#: One device of each architecture: 10 * major + minor -> device.
DEVICES: Mapping[int, Device] = {
    80: _device("nvidia_a100", 80, 40),
    86: _device("nvidia_a10g", 24, 6),
    89: _device("nvidia_l4", 24, 48),
    90: _device("nvidia_h200", 141, 50),
    100: _device("nvidia_b200", 180, 126),
    120: _device("nvidia_geforce_rtx_5090", 32, 96),
}


@contextlib.contextmanager
def pretended(device: Device, prefer: Callable[[str], float] | None = None) -> Iterator[None]:
    """Inside, everything that Inductor asks of the CUDA device is answered from `device`."""
    from torch._inductor import select_algorithm

    for name in ("torch._inductor.codegen.triton", "torch._inductor.kernel.mm"):
        importlib.import_module(name)

    with contextlib.ExitStack() as stack:
        stack.enter_context(_inductor.absent_device(device))
        selector = select_algorithm.AlgorithmSelectorCache

        def time(self: Any, *args: Any, **kwargs: Any) -> dict[Any, float]:
            choices = kwargs["choices"] if "choices" in kwargs else args[5]
            if prefer is None:
                return {choice: float(index + 1) for index, choice in enumerate(choices)}
            return {choice: prefer(str(choice.name)) for choice in choices}

        stack.enter_context(mock.patch.object(selector, "do_autotuning", time))
        stack.enter_context(
            mock.patch.object(selector, "make_precompile_fn", lambda *a, **k: lambda *b, **c: None)
        )
        yield
