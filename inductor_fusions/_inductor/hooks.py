"""Inductor's config hooks for custom passes: read and set for all threads."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from types import CodeType
from typing import Any

import torch

from .loading import inductor_config, when_one_is_loaded
from .versions import torch_version

#: Inductor's config hook of each stage.
HOOKS = {"pre_grad": "pre_grad_custom_pass", "post_grad": "post_grad_custom_pre_pass"}


def hooks_hold_lists() -> bool:
    """Whether a config hook takes a list of passes (torch 2.13 and later)."""
    return torch_version() >= (2, 13)


def missing_hook() -> str | None:
    """The name of a config hook that this torch does not have, or None."""
    return next((name for name in HOOKS.values() if not hasattr(inductor_config(), name)), None)


def get_hook(stage: str) -> list[Callable[..., Any]]:
    """The passes that the hook of `stage` holds now, in order."""
    return _as_list(getattr(inductor_config(), HOOKS[stage]))


def update_hook(stage: str, change: Callable[[list[Any]], list[Any]]) -> None:
    """Replace the passes of a hook by `change(passes)`, for every thread.

    From 2.13 on a config value that is assigned belongs to the thread that assigned it. What all
    threads see, below that, is the value from the environment: ours goes there, and into the value of
    this thread where it has one. (The default would not do: each thread reads a copy of it.)
    """
    name = HOOKS[stage]
    entry = inductor_config()._config[name]
    override = entry.user_override
    if not hasattr(override, "get"):
        setattr(inductor_config(), name, _as_value(stage, change(get_hook(stage))))
        return
    from torch.utils._config_module import _UNSET_SENTINEL as UNSET

    shared = entry.default if entry.env_value_default is UNSET else entry.env_value_default
    passes = change(_as_list(shared))
    entry.env_value_default = _as_value(stage, passes) if passes else UNSET
    if override.get() is not UNSET:
        setattr(inductor_config(), name, _as_value(stage, change(_as_list(override.get()))))


def with_passes_in_options(
    change: Callable[[str, list[Any]], list[Any]], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments of `compile_fx`: in its options, the passes of a hook are `change(stage, passes)`.

    An option replaces the value of the config while a graph is compiled. The caller's options do not change.
    """
    at = 3  # behind the graph, its inputs and the function that compiles aten graphs
    given: dict[str, Any] = (args[at] if len(args) > at else kwargs.get("config_patches")) or {}
    made = {
        name: _as_value(stage, change(stage, _as_list(given[name])))
        for stage, name in HOOKS.items()
        if given.get(name)
    }
    if not made:
        return args, kwargs
    if len(args) > at:
        return (*args[:at], {**given, **made}, *args[at + 1 :]), kwargs
    return args, {**kwargs, "config_patches": {**given, **made}}


def _as_list(held: Any) -> list[Any]:
    if held is None:
        return []
    return list(held) if isinstance(held, (list, tuple)) else [held]


def _as_value(stage: str, passes: list[Any]) -> Any:
    if len(passes) <= 1:
        return passes[0] if passes else None
    if not hooks_hold_lists():
        raise ValueError(f"config.{HOOKS[stage]} of torch {torch.__version__} holds one pass")
    return tuple(passes)


def passes_installed() -> bool:
    """Whether a pass of ours is in the post-grad hook: only then do caches know of our kernels."""
    return any(type(held).__module__.startswith("inductor_fusions.") for held in get_hook("post_grad"))


def after_each_compile(callback: Callable[[], None]) -> None:
    """Call `callback` whenever Dynamo has compiled something, as soon as Dynamo is imported.

    Dynamo's own callbacks would be forgotten at each `torch._dynamo.reset()`.
    """
    dynamo = "torch._dynamo.convert_frame"

    def called(before: CodeType, after: CodeType) -> None:
        callback()

    def register() -> None:
        importlib.import_module(dynamo).register_bytecode_hook(called)

    # Dynamo may be in the middle of its import; it imports its backends later.
    when_one_is_loaded((dynamo, "torch._dynamo.backends.inductor"), register)
