"""How operations of the package are defined and lowered, and the fallback if there is no kernel."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import torch
from torch.utils.flop_counter import register_flop_formula

from . import _inductor, config
from .decisions import unsupported
from .fusion import Rejected

log = logging.getLogger(__name__)


def define(
    name: str,
    compute: Callable[..., Any],
    empty: Callable[..., Any],
    *,
    flops: Callable[..., Any] | None = None,
    setup: Callable[..., None] | None = None,
    backward: Callable[..., Any] | None = None,
    launches: Callable[..., bool] | None = None,
    schema: str | None = None,
) -> Any:
    """Define the operation `inductor_fusions::NAME`, which does not write to its operands.

    Args:
        name: the name of the operation.
        compute: its eager kernel, which is also its reference.
        empty: its fake kernel: takes the same arguments and returns empty results with their dtypes, sizes
            and strides.
        flops: takes the same arguments, with shapes in place of tensors, and returns FLOPs.
        setup, backward: its gradient, as `register_autograd` takes it; None: it has none.
        launches: for an operation that launches Triton kernels itself (`launched`): takes the same arguments
            and returns whether AOTAutograd traces `compute`, so that Inductor launches the kernels. None or
            False: the graph keeps the operation.
        schema: as `torch.library.custom_op` takes it; None: from the annotations of `compute`.

    Returns:
        The overload that graphs call.
    """
    operation = torch.library.custom_op(f"inductor_fusions::{name}", compute, mutates_args=(), schema=schema)
    operation.register_fake(empty)
    if backward is not None:
        operation.register_autograd(backward, setup_context=setup)
    if launches is not None:
        _inductor.decompose_in_graphs(operation, functools.partial(_trace, compute), launches)
    packet = getattr(torch.ops.inductor_fusions, name)
    if flops is not None:

        @register_flop_formula(packet)
        def count(*shapes: Any, out_shape: Any = None, **named: Any) -> Any:
            return flops(*shapes, **named)

    return packet.default


_traced: ContextVar[bool] = ContextVar("inductor_fusions_traced", default=False)


def _trace(compute: Callable[..., Any], *given: Any) -> Any:
    token = _traced.set(True)
    try:
        return compute(*given)
    finally:
        _traced.reset(token)


def is_traced() -> bool:
    """Whether the running operation is being traced, so that its tensors have no addresses."""
    return _traced.get()


def launched(kernel: Any) -> Any:
    """A Triton kernel to launch: itself in eager mode; in a trace, a wrapper that adds a graph node."""
    return torch.library.wrap_triton(kernel) if is_traced() else kernel


def check_templates(device: torch.device) -> None:
    """Check that the kernel templates of the package can be used on a device.

    Raises:
        Rejected: it is no NVIDIA GPU of compute capability 8.0 or later; or the passes are not installed, so
            that Inductor's cache keys would not cover the kernel.
    """
    if not _inductor.passes_installed():
        raise Rejected("the passes are not installed, so the cache key would not cover the kernel")
    if why := unsupported(device):
        raise Rejected(why)


def lower_by(
    operation: Any, name: str, kernel: Callable[..., Any], compute: Callable[..., Any] | None = None
) -> None:
    """Register a lowering of an operation of the package, now or as soon as Inductor is imported.

    Args:
        kernel: takes its arguments, with Inductor's values for tensors, and returns the outputs of a kernel;
            where there is none, it raises `Rejected`. Of any other error there is a warning, and
            `config.strict` raises it.
        compute: what is lowered where there is no kernel: the operation in functions of torch; None: the
            operation is called as it is. A package of AOTInductor cannot call it: the compile raises, and
            is repeated without the fusion.
    """

    def lower(*given: Any) -> Any:
        arguments = [list(each) if isinstance(each, (list, tuple)) else each for each in given]
        try:
            return kernel(*arguments)
        except (Rejected, _inductor.NoKernel) as miss:
            log.info("%s runs without its fused kernel: %s", name, miss)
        except Exception as error:
            if config.strict:
                raise
            log.warning("the fused kernel of %s raised %r; the operation runs without it", name, error)
            log.info("traceback", exc_info=True)
        if compute is not None:
            return _inductor.lower_as(compute, arguments)
        if _inductor.makes_a_package():
            raise RuntimeError(f"{name} has no kernel, and a package of AOTInductor cannot call Python")
        return _inductor.call_eagerly(operation, *arguments)

    _inductor.register_lowering_when_loaded(operation, lower)
