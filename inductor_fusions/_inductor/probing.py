"""Checks of private torch functions, for a torch newer than those tested."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from . import bisector, hooks, reports, templates


def probe() -> None:
    """Call what every compile needs of torch's private parts; raises what they raise."""
    reports.trace_id()
    reports.compile_counters()
    reports.cache_folder()
    bisector.bisecting()
    templates.max_autotune()
    for stage in hooks.HOOKS:
        hooks.get_hook(stage)


@contextlib.contextmanager
def without_modes() -> Iterator[None]:
    """Tensors made inside are real ones on the CPU, whatever is being traced outside."""
    from torch.utils._python_dispatch import _disable_current_modes

    with _disable_current_modes(), torch.autocast("cpu", enabled=False):
        yield
