"""Products that Inductor pads, as it does on a GPU where it measures that to be faster."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from typing import Any
from unittest import mock


@contextlib.contextmanager
def padded(which: int | None, share: float = 0.7) -> Iterator[None]:
    """Pad products of odd sizes (torch/_inductor/fx_passes/pad_mm.py), on the CPU too.

    Args:
        which: the seed that decides which of them; None pads none.
        share: of those that can be.
    """
    if which is None:
        yield
        return
    from torch._inductor.fx_passes import pad_mm

    choose = random.Random(which)

    def should_pad(match: Any, a: Any, b: Any, op: Any, input: Any = None) -> bool:
        return pad_mm.can_pad(a, b, op, input) and choose.random() < share

    with (
        mock.patch.object(pad_mm, "check_device", lambda a, b: True),
        mock.patch.object(pad_mm, "has_triton", lambda: True),
        mock.patch.object(pad_mm, "should_pad", should_pad),
    ):
        yield
