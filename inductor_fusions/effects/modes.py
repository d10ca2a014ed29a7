"""Grad mode, autocast, transforms and SDPA backends at each node of Dynamo's graph.

Dynamo writes `with torch.autocast(...)`, `torch.no_grad()`, `sdpa_kernel(...)` and the transforms of
torch.func into its graph as calls, and what is ambient while it compiles holds where the graph begins. Two
nodes are in the same mode where these come to the same, however often they were entered and left in between.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import fx

from ..reasons import Reason

#: Regions in which values are wrapped, or have a tangent: entered by the first name, left by the second.
TRANSFORMS = {
    "_vmap_increment_nesting": "_vmap_decrement_nesting",
    "_grad_increment_nesting": "_grad_decrement_nesting",
    "_jvp_increment_nesting": "_jvp_decrement_nesting",
    "_enter_dual_level": "_exit_dual_level",
    "enter_dual_level": "exit_dual_level",
}
#: Regions whose values autograd treats otherwise.
GRADIENT_MODES = ("_set_grad_enabled", "_enter_inference_mode", "_exit_inference_mode")
#: Settings of one backend of SDPA, by its public and its private function.
_BACKENDS = {
    "enable_flash_sdp": "FLASH_ATTENTION",
    "_set_sdp_use_flash": "FLASH_ATTENTION",
    "enable_mem_efficient_sdp": "EFFICIENT_ATTENTION",
    "_set_sdp_use_mem_efficient": "EFFICIENT_ATTENTION",
    "enable_math_sdp": "MATH",
    "_set_sdp_use_math": "MATH",
    "enable_cudnn_sdp": "CUDNN_ATTENTION",
    "_set_sdp_use_cudnn": "CUDNN_ATTENTION",
}
#: Backends that SDPA has on the devices that there are fusions for: how each is asked for, and set.
_SWITCHES: dict[str, tuple[Callable[[], bool], Callable[[bool], None]]] = {
    "FLASH_ATTENTION": (torch.backends.cuda.flash_sdp_enabled, torch.backends.cuda.enable_flash_sdp),
    "EFFICIENT_ATTENTION": (
        torch.backends.cuda.mem_efficient_sdp_enabled,
        torch.backends.cuda.enable_mem_efficient_sdp,
    ),
    "MATH": (torch.backends.cuda.math_sdp_enabled, torch.backends.cuda.enable_math_sdp),
    "CUDNN_ATTENTION": (torch.backends.cuda.cudnn_sdp_enabled, torch.backends.cuda.enable_cudnn_sdp),
}
#: Devices on which autocast may be on around the whole graph.
_DEVICES = ("cpu", "cuda")
_DETERMINISTIC = ("_set_deterministic_algorithms", "use_deterministic_algorithms")


@dataclass(frozen=True)
class State:
    """Modes and settings at one place.

    Attributes:
        autocast: for each type of device its dtype where autocast is on, None where it is off.
        gradients: whether autograd records.
        inference: whether inference mode is on.
        transforms: the nodes that entered what is open of `TRANSFORMS`, outermost first.
        backends: the backends that SDPA may use, by name.
        priority: their order, where the caller gave one.
        deterministic: whether deterministic algorithms are asked for, and whether others only warn.
    """

    autocast: tuple[tuple[str, torch.dtype | None], ...]
    gradients: bool
    inference: bool
    transforms: tuple[fx.Node, ...]
    backends: frozenset[str]
    priority: tuple[str, ...]
    deterministic: tuple[bool, bool]

    def differs(self, other: State) -> str:
        """Describes the first difference of two states, or ""."""
        for each in fields(self):
            if getattr(self, each.name) != getattr(other, each.name):
                return _WORDS[each.name]
        return ""

    def within(self, *names: str) -> bool:
        """Whether one of these `TRANSFORMS` is open."""
        return any(name_of(node) in names for node in self.transforms)


_WORDS = {
    "autocast": "autocast changes",
    "gradients": "gradients are switched on or off",
    "inference": "inference mode changes",
    "transforms": "a transform of torch.func begins or ends",
    "backends": "the backends of SDPA change",
    "priority": "the order of SDPA's backends changes",
    "deterministic": "deterministic algorithms are switched on or off",
}


def name_of(node: fx.Node) -> str:
    """The name of what a node calls, without that of an overload."""
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    return name.partition(".")[0]


def is_restricted() -> bool:
    """Whether the caller forbids a backend of SDPA."""
    return not all(enabled() for enabled, _ in _SWITCHES.values())


def ambient() -> State:
    """The state that holds now, while a graph is compiled."""
    return State(
        autocast=(),
        gradients=torch.is_grad_enabled(),
        inference=torch.is_inference_mode_enabled(),
        transforms=(),
        backends=frozenset(name for name, (enabled, _) in _SWITCHES.items() if enabled()),
        priority=(),
        deterministic=(
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
        ),
    )


def settings() -> list[Any]:
    """The settings of the caller that fusions depend on, for cache keys."""
    now = ambient()
    return [sorted(now.backends), *now.deterministic]


@contextlib.contextmanager
def asking(state: State) -> Iterator[None]:
    """Questions to torch inside, such as which kernel SDPA takes, are answered for one place in the graph."""
    before = ambient()
    try:
        _set(state)
        yield
    finally:
        _set(before)


def _set(state: State) -> None:
    now = ambient()
    if state.backends != now.backends:
        for name, (_, enable) in _SWITCHES.items():
            enable(name in state.backends)
    if state.deterministic != now.deterministic:
        mode, warns = state.deterministic
        torch.use_deterministic_algorithms(mode, warn_only=warns)


class Modes:
    """The state at each node of one graph.

    Args:
        start: what holds where it begins; None: what is ambient.
    """

    def __init__(self, graph: fx.Graph, start: State | None = None) -> None:
        state = ambient() if start is None else start
        casts = {device: _ambient_autocast(device) for device in _DEVICES} | dict(state.autocast)
        for node in graph.nodes:
            if name_of(node) == "_enter_autocast":
                casts.setdefault(_device_of(node), _ambient_autocast(_device_of(node)))
        state = replace(state, autocast=tuple(sorted(casts.items(), key=lambda item: item[0])))
        self._states: dict[fx.Node, State] = {}
        before: dict[fx.Node, State] = {}
        for node in graph.nodes:
            self._states[node] = state
            if node.op == "call_function":
                state = _after(node, state, before)
        self.end = state

    def at(self, node: fx.Node) -> State:
        """The state where a node runs; a node that was added later changes none."""
        while node not in self._states and node.op != "root":
            node = node.next
        return self._states.get(node, self.end)

    def check_inference(self, node: fx.Node) -> None:
        """Refuse a node in an inference mode that the graph enters, if it reads a value from outside of it.

        A rewrite may add views of its operands, and torch (seen on 2.11 and 2.13) cannot trace a view of a
        tensor from outside there.
        """
        if self.at(node).inference and not all(self.at(each).inference for each in node.all_input_nodes):
            raise Reason.MODE.rejected(
                "the graph enters inference mode behind an operand, and torch cannot trace views of it there"
            )


def _after(node: fx.Node, state: State, before: dict[fx.Node, State]) -> State:
    """The state after a call, which may enter or leave a mode; `before` has the states at the entries."""
    name = name_of(node)
    if name == "_enter_autocast":
        before[node] = state
        given: tuple[Any, ...] = node.args
        device, (dtype, enabled) = _device_of(node), given[1:3] if len(given) > 2 else (None, True)
        if enabled and not isinstance(dtype, torch.dtype):
            dtype = torch.get_autocast_dtype(device)
        casts = {**dict(state.autocast), device: dtype if enabled else None}
        return replace(state, autocast=tuple(sorted(casts.items(), key=lambda item: item[0])))
    if name == "_exit_autocast":
        return replace(state, autocast=_entered(node, before, state).autocast)
    if name == "_set_grad_enabled":
        return replace(state, gradients=bool(node.args[0]))
    if name == "_enter_inference_mode":
        before[node] = state
        inferring = bool(node.args[0]) if node.args else True
        return replace(state, inference=inferring, gradients=not inferring)
    if name == "_exit_inference_mode":
        left = _entered(node, before, state)
        return replace(state, inference=left.inference, gradients=left.gradients)
    if name in TRANSFORMS:
        return replace(state, transforms=(*state.transforms, node))
    if name in TRANSFORMS.values():
        return replace(state, transforms=_left(state.transforms, name))
    if name in _BACKENDS and node.args:
        one = frozenset((_BACKENDS[name],))
        return replace(state, backends=state.backends | one if node.args[0] else state.backends - one)
    if name == "_sdpa_kernel":
        listed: Any = node.args[0]
        names = tuple(map(_backend, listed))
        ordered = bool(node.args[1]) if len(node.args) > 1 else bool(node.kwargs.get("set_priority"))
        allowed = frozenset(name for name in names if name in _SWITCHES)
        return replace(state, backends=allowed, priority=names if ordered else state.priority)
    if name in _DETERMINISTIC and node.args:
        warns = bool(node.kwargs.get("warn_only", state.deterministic[1]))
        return replace(state, deterministic=(bool(node.args[0]), warns))
    return state


def _entered(leaves: fx.Node, before: dict[fx.Node, State], now: State) -> State:
    """The state before the region that a node leaves."""
    enter = leaves.args[0] if leaves.args else None
    return before.get(enter, now) if isinstance(enter, fx.Node) else now


def _left(transforms: tuple[fx.Node, ...], name: str) -> tuple[fx.Node, ...]:
    """Without the innermost one that a call of this name leaves."""
    for at in reversed(range(len(transforms))):
        if TRANSFORMS[name_of(transforms[at])] == name:
            return (*transforms[:at], *transforms[at + 1 :])
    return transforms


def _backend(given: Any) -> str:
    """The name of a backend that Dynamo's graph makes from a string."""
    return str(given.args[0]) if isinstance(given, fx.Node) else str(getattr(given, "name", given))


def _device_of(enter: fx.Node) -> str:
    return str(enter.args[0])


def _ambient_autocast(device: str) -> torch.dtype | None:
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
