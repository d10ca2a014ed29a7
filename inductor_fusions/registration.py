"""enable() and disable(): the only code that changes Inductor's state."""

from __future__ import annotations

import functools
import logging
import sys
import threading
import uuid
import warnings
from collections.abc import Callable
from typing import Any

import torch

from . import _inductor, config, reporting

log = logging.getLogger(__name__)

_LOST = (
    "%s was overwritten, so %s no longer run. "
    "inductor_fusions.enable() installs them again, in addition to what is there now"
)


def _namespace() -> torch.library.Library:
    """The namespace of the package's operations, which torch gives out once in a process.

    Raises:
        ImportError: an earlier import has it: its operations and passes would be registered twice.
    """
    try:
        return torch.library.Library("inductor_fusions", "DEF")
    except RuntimeError:
        raise ImportError(
            "inductor_fusions was imported before, and its modules were dropped from sys.modules, but torch "
            "still has its operations and passes: start a new process to import it again"
        ) from None


_held = _namespace()  # as long as this module is alive, which Inductor's hooks refer to
_lock = threading.RLock()
_wanted = False
_waiting = False
_warned: set[str] = set()
_watching = False


def enable() -> None:
    """Install the passes in Inductor's config hooks, after the passes that are there.

    Idempotent and thread-safe. It does not import Inductor: if Inductor is not imported yet, the passes are
    installed as soon as it is.
    """
    global _wanted, _waiting
    problem = _inductor.version_problem()
    if problem is not None:
        _warn_once(problem)
        return
    with _lock:
        _wanted = True
        if not config.enabled or _waiting:
            return
        _waiting = True
    _inductor.put_around_compiles(_around, _starts, _keyed, _settings)
    _inductor.when_inductor_loads(_install)


def disable() -> None:
    """Remove the passes from Inductor's config hooks; passes of others stay. Idempotent and thread-safe.

    Code that is already compiled keeps its fused kernels until `torch._dynamo.reset()`.
    """
    global _wanted
    with _lock:
        _wanted = False
        if not _waiting and _inductor.inductor_loaded():
            _remove()
    _inductor.take_from_compiles()


def enabled() -> bool:
    """Whether `torch.compile` currently runs the fusions."""
    with _lock:
        return _wanted and config.enabled


def _around(compile: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if not enabled():
        return compile(*args, **kwargs)
    from .driver import recovery

    args, kwargs = _inductor.with_passes_in_options(_with_ours, args, kwargs)
    return recovery.around(compile, *args, **kwargs)


def _starts(model: Any) -> None:
    from .driver import recovery

    recovery.starts(model)


def _keyed(key: str) -> None:
    from .driver import recovery

    recovery.keyed(key)


def _settings() -> str:
    """What our passes add to the key of a function that Dynamo stores: what the keys of graphs have of them.

    Where graphs bypass caches, it is a key that nothing is found under.
    """
    if not enabled():
        return ""
    from .driver.passes import FusionPass

    passes = (FusionPass(stage, functools.partial(_fusions_of, stage)) for stage in _inductor.HOOKS)
    return "".join(str(each.uuid() or uuid.uuid4()) for each in passes)


def _install() -> None:
    """Append a pass to each hook that has none of the package.

    With a torch that is newer than those tested, an exception becomes a warning, because it would break the
    import of Inductor.
    """
    try:
        _add_passes()
    except Exception as error:
        if not _inductor.beyond_tested():
            raise
        _warn_once(
            f"torch {torch.__version__} is newer than the versions tested; nothing is fused ({error!r})"
        )


def _add_passes() -> None:
    global _waiting, _watching
    half = sys.modules.get(f"{__package__}.driver.passes")
    if half is not None and not hasattr(half, "FusionPass"):
        _inductor.deferred.append(_install)
        return
    from . import fusions  # noqa: F401  (registers the operations and their lowerings)
    from .driver import passes  # noqa: F401  (while the lock is free: its import may install them too)

    with _lock:
        _waiting = False
        if not _wanted:
            return
        missing = _inductor.missing_hook()
        if missing is not None:
            _warn_once(f"torch {torch.__version__} has no config.{missing}; no fusion is registered")
            return
        for stage in _inductor.HOOKS:
            _inductor.update_hook(stage, functools.partial(_with_ours, stage))
        _inductor.join_bisector()
        if not _watching:
            _watching = True
            _inductor.after_each_compile(_notice_loss)


def _with_ours(stage: str, held: list[Any]) -> list[Any]:
    """The passes of a hook, with one of ours behind them."""
    from .driver.passes import FusionPass

    if any(isinstance(item, FusionPass) for item in held):
        return held
    ours = functools.partial(_fusions_of, stage)
    if _inductor.hooks_hold_lists():
        return [*held, FusionPass(stage, ours)]
    return [FusionPass(stage, ours, before=held[0] if held else None)]


def _notice_loss() -> None:
    """Log once that a hook was overwritten: nothing of its stage is fused; without post-grad, nothing at all.

    A log record, not a warning: in a compile, a warning that is configured as an error would end it.
    """
    from .driver.passes import FusionPass

    if not enabled() or _LOST in _warned:
        return
    lost = [
        f"torch._inductor.config.{name}"
        for stage, name in _inductor.HOOKS.items()
        if not any(isinstance(held, FusionPass) for held in _inductor.get_hook(stage))
    ]
    if lost:
        _warned.add(_LOST)
        log.warning(_LOST, " and ".join(lost), "the fusions" if reporting.are_off() else "the fusions there")


def _fusions_of(stage: str) -> Any:
    from . import registry

    return registry.of(stage)


def _remove() -> None:
    from .driver.passes import FusionPass

    def without(held: list[Any]) -> list[Any]:
        kept = [item.before if isinstance(item, FusionPass) else item for item in held]
        return [item for item in kept if item is not None]

    for stage in _inductor.HOOKS:
        _inductor.update_hook(stage, without)


def _warn_once(text: str) -> None:
    if text not in _warned:
        _warned.add(text)
        warnings.warn(f"inductor_fusions: {text}", stacklevel=3)
