"""Fusions that decide as on a GPU, where there is none; what they make runs on the CPU."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from devtools.ledger.compiling import on_a_gpu
from inductor_fusions import config, reporting, testing

if TYPE_CHECKING:
    from tests.block_mm.support import Run


def judge(function: Callable[..., Any], inputs: Sequence[torch.Tensor], early: bool) -> Sequence[Any]:
    """The sites of a function whose results are right; in training where an input takes a gradient.

    Args:
        early: it is fused before autograd: judged on the graphs that Dynamo makes.

    Raises:
        AssertionError: a result is wrong.
    """
    if not early:
        from tests.fuzz.judge import check_products

        return check_products(function, inputs)
    train = any(x.requires_grad for x in inputs)
    options = {"backend": testing.EAGER_AFTER_PASSES, "fused": None, "slack": 2.0, "train": train}
    with on_a_gpu():
        return testing.check(function, inputs, **options).sites


@contextlib.contextmanager
def compiled(
    function: Callable[..., Any], dynamic: bool | None = None, fullgraph: bool = False, **toggles: Any
) -> Iterator[tuple[Callable[..., Any], Run]]:
    """A function compiled as for a GPU, with its graphs; it has its sites at the end.

    Args:
        function: a function or a module.
        dynamic, fullgraph: as in `torch.compile`.
    """
    from torch._inductor import config as inductor_config

    from tests.block_mm.support import Run, as_on_a_gpu

    seen = Run()
    torch._dynamo.reset()
    with (
        on_a_gpu(),
        inductor_config.patch(force_disable_caches=True),
        config.patch(**{"policy": "always", "strict": True, **toggles}),
        reporting.isolated() as seen.sites,
    ):
        yield torch.compile(function, backend=as_on_a_gpu(seen), dynamic=dynamic, fullgraph=fullgraph), seen
