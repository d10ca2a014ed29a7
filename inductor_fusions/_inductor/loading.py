"""Callbacks that run once Inductor is imported, and Inductor's config."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any


def inductor_config() -> Any:
    """Inductor's config, which the first call imports."""
    return importlib.import_module("torch._inductor.config")


class _AfterImport(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Runs callbacks once, in order, right after a module is first imported."""

    def __init__(self, module: str) -> None:
        self.module = module
        self.callbacks: list[Callable[[], None]] = []
        self.loader: Any = None

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != self.module:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)  # others may wait for the same module
        if spec is None or spec.loader is None:
            return spec
        self.loader, spec.loader = spec.loader, self
        return spec

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        module: ModuleType | None = self.loader.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        module.__spec__.loader = module.__loader__ = self.loader
        self.loader.exec_module(module)
        for callback in self.callbacks:
            callback()


def draws_as_eager() -> bool:
    """Whether random numbers in compiled code are those of eager mode: dropouts are then not decomposed."""
    return bool(inductor_config().fallback_random)


def eager_bits_are_wanted() -> bool:
    """Whether compiled code is to give the bits of eager code (torch 2.15), as far as Inductor knows to."""
    return getattr(inductor_config(), "numerics", "default") != "default"


def is_deterministic() -> bool:
    """Whether Inductor is to compile alike every time: nothing is chosen by measuring."""
    return bool(getattr(inductor_config(), "deterministic", False))


def inductor_loaded() -> bool:
    """Whether Inductor's config is imported."""
    return "torch._inductor.config" in sys.modules


def when_inductor_loads(callback: Callable[[], None]) -> None:
    """Call `callback` now if Inductor's config is imported, else as soon as it is."""
    when_loaded("torch._inductor.config", callback)


def when_loaded(module: str, callback: Callable[[], None]) -> None:
    """Call `callback` now if a module is imported, else as soon as it is."""
    if module in sys.modules:
        callback()
        return
    # One for each module: the finder that answers is the only one whose loader runs.
    waiting = (each for each in sys.meta_path if isinstance(each, _AfterImport) and each.module == module)
    found = next(waiting, None)
    if found is None:
        found = _AfterImport(module)
        sys.meta_path.insert(0, found)
    found.callbacks.append(callback)


def when_one_is_loaded(modules: Sequence[str], callback: Callable[[], None]) -> None:
    """`when_loaded` for the first of some modules that is not in the middle of its import."""
    for name in modules:
        spec = getattr(sys.modules.get(name), "__spec__", None)
        if not getattr(spec, "_initializing", False):
            when_loaded(name, callback)
            return


#: What waits until the module of the passes is imported: its own import may be what imports Inductor.
deferred: list[Callable[[], None]] = []


def run_deferred() -> None:
    """Call what waited for the module of the passes."""
    while deferred:
        deferred.pop()()
