"""If the first call of compiled code raises, the graph is compiled again and the call is repeated.

A kernel refuses inputs that it does not support when it is first called. After the first call that returns,
one more Python call for each call is all that remains.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from typing import Any

import torch

from .. import _inductor, config

#: Inputs that the graph writes to are copied for a second call if they have at most KEPT bytes together, or
#: at most this share of the free memory of their device.
KEPT = 64 * 2**20
SHARE = 0.25

#: Takes the exception of the first call, and the call. Returns the code to call from now on, and the outputs
#: of the repeated call.
Relaunch = Callable[[Exception, "Call"], tuple[Any, Any]]


def guarded(compiled: Any, written: Callable[[], Sequence[int] | None], relaunch: Relaunch) -> Any:
    """A function that calls `compiled`, and calls `relaunch` if the first call raises.

    Args:
        compiled: Inductor's result for a graph. It is returned as it is unless it is a plain function.
        written: returns the positions of the inputs that it writes to, or None if they are unknown.
        relaunch: called if the first call raises.
    """
    inner = _inductor.as_function(compiled)
    positions = written()
    if inner is None or positions is None:
        return compiled

    run: Callable[..., Any] = inner

    def first(*args: Any) -> Any:
        nonlocal run
        call = Call(args, positions)
        if call.traced:
            return inner(*args)
        if not call.repeatable:
            run = inner
            return inner(*args)
        try:
            outputs = inner(*args)
        except Exception as error:
            if config.strict or _inductor.is_for_the_caller(error) or not call.may_repeat():
                raise
            traceback.clear_frames(error.__traceback__)
            run = inner
            run, outputs = relaunch(error, call)
            return outputs
        run = inner
        return outputs

    run = first

    def call(*args: Any) -> Any:
        return run(*args)

    return _inductor.in_place_of(call, inner)


def guard_backward(compiled: Any, written: Sequence[int], relaunch: Relaunch) -> None:
    """Guard the first call of a backward, whose code is changed in place.

    What the forward saved is held until the first call returns. If memory runs out, the call is repeated
    without holding it.

    Args:
        compiled: Inductor's result for an aten graph.
        written: positions of the inputs that it may write to, because nothing reads them afterwards.
        relaunch: called if the first call raises.
    """
    original = getattr(compiled, "current_callable", None)
    if original is None:
        return

    def first(inputs: Any) -> Any:
        call = Call((inputs,), written)
        if call.traced:
            return original(inputs)
        compiled.current_callable = original
        if not call.repeatable:
            return original(inputs)
        try:
            return original(inputs)
        except Exception as error:
            full = _inductor.is_out_of_memory(error)
            if config.strict or not call.may_repeat() or (_inductor.is_for_the_caller(error) and not full):
                raise
            traceback.clear_frames(error.__traceback__)
            if not full:
                compiled.current_callable, outputs = relaunch(error, call)
                return outputs
        inputs[:] = call.released()
        return original(inputs)

    compiled.current_callable = first


class Call:
    """One call of compiled code, and what is needed to repeat it."""

    def __init__(self, args: tuple[Any, ...], written: Sequence[int]) -> None:
        # A function that is given its arguments in a list empties the list.
        self.boxed = _is_boxed(args)
        self.values = list(args[0]) if self.boxed else list(args)
        self.traced = _inductor.calls_with_fakes(self.values)
        overwritten = [self.values[i] for i in written if i < len(self.values)]
        tensors = [each for each in overwritten if isinstance(each, torch.Tensor)]
        self.repeatable = self.traced or _may_be_kept(tensors)
        if self.traced or not self.repeatable:
            return
        with torch.no_grad():
            self.kept = [(each, each.clone()) for each in tensors]
        self.versions = [_version(each) for each in self.values]
        self.random = _inductor.random_state()

    def may_repeat(self) -> bool:
        """Whether the call can be repeated: it has left the inputs as they were, and the device works."""
        mutable = {id(each) for each, _ in self.kept}
        same = all(
            id(each) in mutable or _version(each) == version
            for each, version in zip(self.values, self.versions, strict=True)
        )
        return same and _inductor.devices_work(self.values)

    def released(self) -> list[Any]:
        """The arguments as they were before the call; they are released here."""
        self._put_back()
        values, self.values, self.kept = self.values, [], []
        return values

    def _put_back(self) -> None:
        self.random()
        with torch.no_grad():
            for each, kept in self.kept:
                each.copy_(kept)

    def repeat(self, compiled: Any) -> Any:
        """Repeat the call with other code."""
        self._put_back()
        return compiled(list(self.values)) if self.boxed else compiled(*self.values)


def _may_be_kept(tensors: Sequence[torch.Tensor]) -> bool:
    size = sum(each.nbytes for each in tensors)
    if size <= KEPT:
        return True
    devices = {each.device for each in tensors}
    free = [torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 0 for device in devices]
    return size <= SHARE * min(free)


def _is_boxed(args: tuple[Any, ...]) -> bool:
    return len(args) == 1 and isinstance(args[0], list)


def _version(value: Any) -> int:
    return value._version if isinstance(value, torch.Tensor) and not value.is_inference() else 0


def sizes_of(values: Sequence[Any]) -> list[Any]:
    """Sizes and strides of tensors, and numbers."""
    return [
        (tuple(each.shape), each.stride()) if isinstance(each, torch.Tensor) else each
        for each in values
        if isinstance(each, (torch.Tensor, int, float))
    ]


def for_sizes(compiled: Any, sizes: list[Any], otherwise: Callable[..., Any]) -> Any:
    """A function that calls `compiled` for arguments of these sizes, else `otherwise(*arguments)`."""

    def call(*args: Any) -> Any:
        values = args[0] if _is_boxed(args) else args
        return compiled(*args) if sizes_of(values) == sizes else otherwise(*values)

    return call
