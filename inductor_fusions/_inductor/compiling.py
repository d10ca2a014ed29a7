"""Compiles for tests, and isolated compiles that leave the caller's state unchanged."""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib
import inspect
import sys
import warnings
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from types import CodeType
from typing import Any

import torch
from torch import fx

from .loading import inductor_config
from .moving import autograd_on_cpu, copied, on_cuda
from .shapes import fake_mode_of, without_subclass


@contextlib.contextmanager
def fresh_compile() -> Iterator[None]:
    """Compile anew inside: no cache is read or written, no compiled code is kept from before."""
    import torch._dynamo

    torch._dynamo.reset()
    with inductor_config().patch(force_disable_caches=True):
        yield
    torch._dynamo.reset()


def compile_each_anew() -> None:
    """Compile without caches of graphs from now on, in this process alone; those of kernels are used.

    Inductor is imported, so that children of this process need not do it. That uses no device.
    """
    import torch._functorch.config
    import torch._inductor.compile_fx
    import torch._inductor.graph

    torch._functorch.config.enable_autograd_cache = False
    inductor_config().fx_graph_cache = inductor_config().fx_graph_remote_cache = False
    inductor_config().compile_threads = 1


def without_attention_patterns() -> None:
    """Keep stock's attention patterns from being registered in this process, which has compiled nothing yet.

    What matches one of them is a call of SDPA already: the same attention in another form would be taken to
    gain nothing. Source: `lazy_init` of torch/_inductor/fx_passes/joint_graph.py.
    """
    registering: Any = importlib.import_module("torch._inductor.fx_passes.fuse_attention")
    registering._sfdp_init = lambda *_: None


@contextlib.contextmanager
def isolated_compile() -> Iterator[Callable[..., Any]]:
    """Gives a `compile(fn, backend, dynamic)` whose work leaves no trace, and that finds none.

    Caches on disk are neither read nor written. The code that Dynamo keeps for the caller stays; what is
    added inside goes at the end, as do counters and what Dynamo remembers of sizes. Random number generators
    go on as if nothing had been drawn.

    A backend is told apart by identity: it must be an object that is made for this use.
    """
    from torch._dynamo import config as dynamo_config
    from torch._dynamo import convert_frame, pgo
    from torch._dynamo.utils import counters

    kept_before: dict[CodeType, set[int]] = {}
    counted = {name: Counter(values) for name, values in counters.items()}
    sizes = pgo._CODE_STATE
    limits = {"recompile_limit": sys.maxsize, "accumulated_recompile_limit": sys.maxsize}
    options: dict[str, Any] = {}
    if "isolate_recompiles" in inspect.signature(torch.compile).parameters:
        options["isolate_recompiles"] = True

    def note(code: CodeType, new_code: CodeType) -> None:
        # The hook runs before the new entry is kept.
        kept_before.setdefault(code, {id(entry.guard_manager) for entry in _entries(code)})

    def compile(fn: Callable[..., Any], backend: Any, dynamic: bool | None = None) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            return fn(*args, **kwargs)

        # Dynamo keeps what it compiled with the code of the outermost function: this one, which is new.
        call.__code__ = call.__code__.replace()
        compiled: Callable[..., Any] = torch.compile(call, backend=backend, dynamic=dynamic, **options)
        return compiled

    hook = convert_frame.register_bytecode_hook(note)
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    pgo._CODE_STATE = defaultdict(pgo.CodeState)
    try:
        with (
            warnings.catch_warnings(),
            inductor_config().patch(force_disable_caches=True),
            dynamo_config.patch(limits),
            torch.compiler.set_stance("default"),
            torch.random.fork_rng(devices),
        ):
            warnings.filterwarnings("ignore", message="dynamo_pgo force disabled")
            yield compile
    finally:
        hook.remove()
        for code, known in kept_before.items():
            for entry in _entries(code):
                if id(entry.guard_manager) not in known:
                    _drop(entry)
        pgo._CODE_STATE = sizes
        counters.clear()
        counters.update(counted)


def _entries(code: CodeType) -> list[Any]:
    """Dynamo's cache entries of a code object."""
    from torch._dynamo import eval_frame

    return list(eval_frame._debug_get_cache_entry_list(code))


def _drop(entry: Any) -> None:
    """Invalidate an entry as Dynamo does when an object that its code depends on is gone."""
    from torch._dynamo.guards import DeletedGuardManagerWrapper

    manager, gone = entry.guard_manager, DeletedGuardManagerWrapper("compiled apart")
    if isinstance(manager, DeletedGuardManagerWrapper) or manager.extra_state is None:
        return
    # Where torch.compile cannot isolate recompiles (2.11), the caller's limit of recompiles would count the
    # entry. Dynamo does not count entries that hold an object which the frame does not have.
    gone.id_matched_objs = {"": weakref.ref(type(gone))}
    # Its arguments changed after 2.13; where none of these fits, the entry stays, and matches nothing.
    for arguments in ((entry, gone), (entry, gone, manager), (gone, manager)):
        with contextlib.suppress(TypeError):
            manager.extra_state.invalidate(*arguments)
            return


def inductor() -> Callable[..., Any]:
    """A backend, equal to no other, that is Inductor."""

    def backend(graph: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        stock: Any = importlib.import_module("torch._inductor.compile_fx")
        compiled: Callable[..., Any] = stock.compile_fx(graph, example_inputs)
        return compiled

    return backend


def passes_only(traces_on_cpu: Callable[[fx.GraphModule], bool] = lambda graph: False) -> Callable[..., Any]:
    """A backend, equal to no other, that is Inductor up to its last pass.

    Every decision of a fusion is taken in a pass, so this shows them all without generating code.

    Args:
        traces_on_cpu: of which graphs of fake tensors, on a CUDA device that is absent, autograd is traced
            on the CPU (`moving.autograd_on_cpu`). The backward is compiled as well, and the caller's graph is
            run afterwards, whose gradients nobody can take. Else aten operations are run afterwards.
    """

    def lower(
        is_on_cpu: bool, graph: fx.GraphModule, example_inputs: Sequence[Any], **options: Any
    ) -> Callable[..., Any]:
        from torch._inductor.virtualized import V
        from torch.fx import GraphModule

        stock: Any = importlib.import_module("torch._inductor.compile_fx")
        functorch: Any = importlib.import_module("functorch.compile")
        runs = GraphModule(graph, copy.deepcopy(graph.graph))
        stock.view_to_reshape(graph)  # some results have other strides on a GPU than on the CPU
        if is_on_cpu:
            graph, _ = on_cuda(graph, example_inputs)
        mode = fake_mode_of(graph.graph)
        with contextlib.ExitStack() as stack:
            if mode is not None:
                stack.enter_context(V.set_fake_mode(mode))
            stock._recursive_post_grad_passes(graph, is_inference=bool(options.get("is_inference")))

        def run(*args: Any) -> Any:  # torch (2.13) runs no aten operation on a subclass in the first call
            return runs.forward(*map(without_subclass, args))

        boxed: Callable[..., Any] = functorch.make_boxed_func(run)
        return boxed

    def backend(graph: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        stock: Any = importlib.import_module("torch._inductor.compile_fx")
        is_on_cpu = traces_on_cpu(graph)
        inner_compile = functools.partial(lower, is_on_cpu)
        if not is_on_cpu:
            compiled: Callable[..., Any] = stock.compile_fx(
                graph, example_inputs, inner_compile=inner_compile
            )
            return compiled
        functorch_config: Any = importlib.import_module("torch._functorch.config")
        runs: Callable[..., Any] = copied(graph).forward
        with autograd_on_cpu(), functorch_config.patch(force_non_lazy_backward_lowering=True):
            stock.compile_fx(graph, example_inputs, inner_compile=inner_compile)
        return runs

    return backend
