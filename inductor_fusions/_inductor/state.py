"""Saves and restores the process state that a failing compile may change.

A graph switches modes on and off by calls (`sdpa_kernel`, autocast, gradients, `torch.func`): where its
tracing ends in the middle, the second call is never made.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch


class GlobalState:
    """Modes, random state and tracing state, as they are now."""

    def __init__(self) -> None:
        self._undo = [
            _modes(), _sdp(), _autocast(), _transforms(), random_state(), _tracing(),
        ]  # fmt: skip

    def restore(self) -> None:
        """Restore this state."""
        for undo in self._undo:
            undo()

    def later(self) -> GlobalState:
        """A state with the modes and random state of now, and the tracing state of this one."""
        made = GlobalState()
        made._undo[-1] = self._undo[-1]
        return made


def _modes() -> Callable[[], None]:
    grad = torch.is_grad_enabled()
    deterministic = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    hooks = torch._C._autograd._saved_tensors_hooks_get_disabled_error_message()

    def undo() -> None:
        torch._C._set_grad_enabled(grad)
        torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)
        if hooks is None:
            torch._C._autograd._saved_tensors_hooks_enable()
        else:
            torch._C._autograd._saved_tensors_hooks_disable(hooks)

    return undo


def _sdp() -> Callable[[], None]:
    found = {}
    for name in dir(torch._C):
        setter = getattr(torch._C, name.replace("_get_", "_set_sdp_use_").removesuffix("_sdp_enabled"), None)
        if name.startswith("_get_") and name.endswith("_sdp_enabled") and setter is not None:
            found[setter] = getattr(torch._C, name)()
    order = torch._C._get_sdp_priority_order()

    def undo() -> None:
        for setter, value in found.items():
            setter(value)
        if torch._C._get_sdp_priority_order() != order:
            torch._C._set_sdp_priority_order(order)

    return undo


def _autocast() -> Callable[[], None]:
    devices = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    found = [(each, torch.is_autocast_enabled(each), torch.get_autocast_dtype(each)) for each in devices]
    cache, nesting = torch.is_autocast_cache_enabled(), _nesting()

    def undo() -> None:
        for device, enabled, dtype in found:
            torch.set_autocast_enabled(device, enabled)
            torch.set_autocast_dtype(device, dtype)
        torch.set_autocast_cache_enabled(cache)
        while _nesting() > nesting:
            if torch.autocast_decrement_nesting() == 0:
                torch.clear_autocast_cache()

    return undo


def _nesting() -> int:
    torch.autocast_increment_nesting()
    return int(torch.autocast_decrement_nesting())


def _transforms() -> Callable[[], None]:
    from torch.autograd import forward_ad

    depth, level = torch._C._functorch.get_dynamic_layer_stack_depth(), forward_ad._current_level

    def undo() -> None:
        torch._C._functorch.pop_dynamic_layer_stack_and_undo_to_depth(depth)
        while forward_ad._current_level > level:
            forward_ad.exit_dual_level(level=forward_ad._current_level)

    return undo


def random_state() -> Callable[[], None]:
    """Gives what puts the default random number generators back to where they are now.

    Those of GPUs stay where a CUDA graph is captured: they cannot be asked then.
    """
    cpu = torch.random.get_rng_state()
    known = torch.cuda.is_initialized() and not torch.cuda.is_current_stream_capturing()
    devices = range(torch.cuda.device_count()) if known else ()
    with torch._C.DisableTorchFunction():
        cuda = {each: torch.cuda.get_rng_state(each) for each in devices}

    def undo() -> None:
        torch.random.set_rng_state(cpu)
        with torch._C.DisableTorchFunction():
            for device, state in cuda.items():
                torch.cuda.set_rng_state(state, device)

    return undo


def _tracing() -> Callable[[], None]:
    """Saves what AOTAutograd writes into Dynamo's context, and unbacked sizes that are pending."""
    from torch._guards import TracingContext

    context = TracingContext.try_get()
    if context is None:
        return lambda: None
    found = dict(vars(context))
    # A nested region is traced once: what was traced of a body that was fused must go.
    regions = [
        (cache, {name: _copied(value) for name, value in vars(cache).items()})
        for cache in context.hop_dispatch_set_cache.hop_cache_map.values()
    ]
    sizes = getattr(context.fake_mode, "shape_env", None)
    pending = list(getattr(sizes, "pending_fresh_unbacked_symbols", ()))

    def undo() -> None:
        vars(context).update(found)
        for cache, values in regions:
            vars(cache).update({name: _copied(value) for name, value in values.items()})
        if sizes is not None:
            sizes.pending_fresh_unbacked_symbols[:] = pending

    return undo


def _copied(value: Any) -> Any:
    """A copy of a dictionary and of those in it."""
    if not isinstance(value, dict):
        return value
    made = copy.copy(value)
    for key, each in value.items():
        made[key] = copy.copy(each) if isinstance(each, (dict, list, set)) else each
    return made


def donated() -> list[int]:
    """Which inputs of the backward that is compiled now its code may write to."""
    from torch._guards import TracingContext

    metadata = getattr(TracingContext.try_get(), "fw_metadata", None)
    return list(getattr(metadata, "bw_donated_idxs", None) or ())


class Context:
    """Where a graph was compiled: what Dynamo's contexts say there, for compiling it again later."""

    def __init__(self, inputs: Sequence[Any] = ()) -> None:
        from torch._guards import CompileContext, TracingContext

        self._tracing, self._compile = TracingContext.try_get(), CompileContext.try_get()
        self._grad = torch.is_grad_enabled()
        # Which sizes of an input are symbolic. Dynamo forgets that after a compile, because its weak
        # references keep `torch.utils.swap_tensors` from working; without it all sizes would be.
        known = {} if self._tracing is None else self._tracing.tensor_to_context
        tensors = [each for each in inputs if isinstance(each, torch.Tensor)]
        self._sizes = [(each, known[each]) for each in tensors if each in known]

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        """Compile inside as if Dynamo did, with its lock."""
        from torch._dynamo.convert_frame import compile_lock
        from torch._guards import compile_context, tracing
        from torch.utils._python_dispatch import _disable_current_modes

        with (
            compile_lock, _disable_current_modes(), torch.set_grad_enabled(self._grad),
            tracing(self._tracing), compile_context(self._compile),
        ):  # fmt: skip
            if self._tracing is None:
                yield
                return
            self._tracing.tensor_to_context.update(self._sizes)
            try:
                yield
            finally:
                self._tracing.tensor_to_context.clear()

    def written(self) -> list[int] | None:
        """Positions of the inputs that the graph writes to; None if they are unknown."""
        metadata = getattr(self._tracing, "fw_metadata", None)
        if metadata is None:
            return None
        return [i for i, info in enumerate(metadata.input_info) if info.mutates_data]

    def guards(self) -> int:
        """How many facts about symbolic sizes compiled code relies on."""
        sizes = getattr(getattr(self._tracing, "fake_mode", None), "shape_env", None)
        return len(sizes.guards) + len(sizes.replacements) if sizes is not None else 0
