"""Wraps each Inductor compile: its start, exceptions, result and cache entry."""

from __future__ import annotations

import functools
import hashlib
import importlib
import shutil
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FunctionType
from typing import Any

import torch
from torch import fx

from .graphs import passes_over
from .loading import when_loaded

_MODULE = "torch._inductor.compile_fx"
#: Marks what stands in for a function of Inductor.
_OURS = "_inductor_fusions_original"

#: Gets the function that compiles, the graph, its inputs and the other arguments; returns the compiled code.
Around = Callable[..., Any]


def put_around_compiles(
    around: Around,
    starts: Callable[[Any], None],
    keyed: Callable[[str], None],
    settings: Callable[[], str],
) -> None:
    """Let every `compile_fx` go through `around`, as soon as Inductor is imported.

    Args:
        around: is called as `around(compile, model, inputs, *args, **kwargs)` in place of `compile`.
        starts: is told of a graph before Inductor's first pass over it.
        keyed: is told of each key under which AOTAutograd's cache looks for a graph.
        settings: what compiled code depends on because of us, or "". It joins the keys under which Dynamo
            stores whole functions (`caching_precompile`), which tell functions by their names and lines.
    """

    def compile_fx(original: Any) -> Any:
        def call(model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            return around(original, model, inputs, *args, **kwargs)

        return call

    def run_pre_grad_passes(original: Any) -> Any:
        def call(model: Any, *args: Any, **kwargs: Any) -> Any:
            starts(model)
            with passes_over(model):
                return original(model, *args, **kwargs)

        return call

    def autograd_cache_key(original: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            found = original(*args, **kwargs)
            keyed(found[0])
            return found

        return call

    def source_id_from_fn(original: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            found, ours = original(*args, **kwargs), settings()
            return hashlib.sha256(f"{found}{ours}".encode()).hexdigest() if ours else found

        return call

    def install() -> None:
        _replace(_MODULE, "compile_fx", compile_fx)
        _replace(_MODULE, "run_pre_grad_passes", run_pre_grad_passes)
        when_loaded(_CACHE, lambda: _replace(_CACHE, "autograd_cache_key", autograd_cache_key))

    when_loaded(_MODULE, install)
    when_loaded(_PACKAGE, lambda: _replace(_PACKAGE, "source_id_from_fn", source_id_from_fn))


_CACHE = "torch._functorch._aot_autograd.autograd_cache"
_PACKAGE = "torch._dynamo.package"


def _owner(module: str) -> Any:
    """What has the functions that are replaced: a module, or the class of a static method."""
    found = sys.modules.get(module)
    return getattr(found, "CompilePackage", None) if module == _PACKAGE else found


def _replace(module: str, name: str, make: Callable[[Any], Any]) -> None:
    owner = _owner(module)
    original = getattr(owner, name, None)
    if original is None or hasattr(original, _OURS):
        return
    made = functools.wraps(original)(make(original))
    setattr(made, _OURS, original)
    _put(owner, name, made)


def _put(owner: Any, name: str, function: Any) -> None:
    setattr(owner, name, staticmethod(function) if isinstance(owner, type) else function)


def take_from_compiles() -> None:
    """Put Inductor's own functions back, where nobody has replaced ours."""
    for module, names in (
        (_MODULE, ("compile_fx", "run_pre_grad_passes")),
        (_CACHE, ("autograd_cache_key",)),
        (_PACKAGE, ("source_id_from_fn",)),
    ):
        owner = _owner(module)
        for name in names:
            original = getattr(getattr(owner, name, None), _OURS, None)
            if original is not None:
                _put(owner, name, original)


def with_inner_compile(
    around: Around, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments of `compile_fx` behind the inputs: the compile of each aten graph goes through `around`."""
    compile_fx: Any = importlib.import_module(_MODULE)
    given = args[0] if args else kwargs.get("inner_compile", compile_fx.compile_fx_inner)

    @functools.wraps(given)
    def inner_compile(*arguments: Any, **keywords: Any) -> Any:
        return around(given, *arguments, **keywords)

    if args:
        return (inner_compile, *args[1:]), kwargs
    return args, {**kwargs, "inner_compile": inner_compile}


def cache_key(compiled: Any) -> str:
    """The key of the code of an aten graph in Inductor's cache of graphs, or ""."""
    return getattr(compiled, "_fx_graph_cache_key", None) or ""


def is_flat(model: fx.GraphModule, inputs: Sequence[Any]) -> bool:
    """Whether `compile_fx` takes a graph as it is, as it does those of Dynamo; others it changes first."""
    compile_fx: Any = importlib.import_module(_MODULE)
    return (
        bool(compile_fx.graph_returns_tuple(model))
        and type(model.graph._codegen).__name__ == "CodeGen"
        and not any(isinstance(each, (list, tuple, dict)) for each in inputs)
    )


#: Parts of error messages after which a device runs nothing any more.
_BEYOND_REPAIR = (
    "illegal memory access", "device-side assert", "misaligned address", "unspecified launch failure",
    "illegal instruction", "hardware stack", "invalid program counter", "uncorrectable",
)  # fmt: skip


def is_for_the_caller(error: BaseException) -> bool:
    """Whether an exception is not about the compiled code: Dynamo restarts, memory is out, or the like."""
    from torch._dynamo import exc

    dynamo = (exc.RestartAnalysis, exc.SkipFrame)
    for each in _causes(error):
        if isinstance(each, (*dynamo, MemoryError, torch.OutOfMemoryError)) or not isinstance(
            each, Exception
        ):
            return True
        if any(words in str(each) for words in _BEYOND_REPAIR):
            return True
    return False


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory is out."""
    return any(isinstance(each, (MemoryError, torch.OutOfMemoryError)) for each in _causes(error))


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = getattr(error, "inner_exception", None) or error.__cause__


def clear_frames(error: BaseException) -> None:
    """Clear the frames of an exception, which may hold guards of modes such as inference mode."""
    for each in _causes(error):
        traceback.clear_frames(each.__traceback__)


def devices_work(values: Sequence[Any]) -> bool:
    """Whether the devices of some tensors still run anything, after a call has raised."""
    try:
        for index in {
            each.device.index for each in values if isinstance(each, torch.Tensor) and each.is_cuda
        }:
            torch.cuda.synchronize(index)
    except Exception:
        return False
    return True


def calls_with_fakes(values: Sequence[Any]) -> bool:
    """Whether a call is part of a trace."""
    from torch._subclasses import FakeTensor

    return any(isinstance(each, FakeTensor) for each in values)


def as_function(compiled: Any) -> FunctionType | None:
    """The plain function of a compiled graph, without the wrapper that keeps Dynamo out; or None."""
    inner = getattr(compiled, "_torchdynamo_orig_callable", compiled)
    return inner if isinstance(inner, FunctionType) else None


def in_place_of(made: Callable[..., Any], inner: Callable[..., Any]) -> Callable[..., Any]:
    """`made` with the attributes of `inner`, excluded from Dynamo's tracing."""
    own = ("_torchdynamo", "__wrapped__")
    for name, value in vars(inner).items():
        if not name.startswith(own):
            setattr(made, name, value)
    wrapped: Callable[..., Any] = torch._dynamo.disable(made, reason="do not trace AOT-compiled graph")
    return wrapped


def forget_cached(joint: Sequence[str], graphs: Sequence[str]) -> None:
    """Remove entries from the disk: of AOTAutograd's cache, and of the cache of graphs."""
    of_joint: Any = importlib.import_module(_CACHE).AOTAutogradCache
    of_graphs: Any = importlib.import_module("torch._inductor.codecache").FxGraphCache
    for cache, keys in ((of_joint, joint), (of_graphs, graphs)):
        for key in keys:
            shutil.rmtree(Path(cache._get_tmp_dir_for_key(key)), ignore_errors=True)
