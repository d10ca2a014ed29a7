"""The one module that imports private torch names; differences between torch versions live here.

| torch | a config hook holds | a pre-grad pass is in the cache key by |
|---|---|---|
| 2.11, 2.12 | one callable | its pickled value (2.11), its uuid (2.12) |
| 2.13 to 2.15 | a callable or a list of them | its uuid |

| torch | what differs besides |
|---|---|
| 2.11 | pre-grad passes run before the caches are asked; patterns take any divisor for sqrt(head_dim) |
| 2.11 | a fake product has numbers for a symbolic batch, outside of the Python dispatcher |
| 2.11, 2.12 | a nested compile region is differentiated only where AOTAutograd traces it |
| before 2.15 | attention patterns raise where scores are divided by a tensor |
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import hashlib
import importlib.abc
import importlib.machinery
import importlib.util
import inspect
import logging
import re
import sys
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import CodeType, ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._config_module import Config, install_config_module

if TYPE_CHECKING:
    from torch import fx
    from torch._inductor.custom_graph_pass import CustomGraphPass

__all__ = [
    "HOOKS",
    "Config",
    "CustomGraphPass",
    "Variant",
    "artifact_log",
    "bisected_away",
    "cache_folder",
    "compile_apart",
    "compile_counters",
    "computing_fakes",
    "drops_narrow_casts",
    "fake_mode_of",
    "flex_attention_op",
    "flex_block_mask",
    "flex_on_cpu",
    "fresh_compile",
    "get_hook",
    "inductor",
    "install_config_module",
    "is_dense",
    "known_true",
    "passes_only",
    "rename",
    "suppress_guards",
    "torch_version",
    "trace_artifact",
    "trace_id",
    "update_hook",
    "version_problem",
    "when_inductor_loads",
]


Pair = tuple[Any, Any]


def __getattr__(name: str) -> Any:
    # Importing any module of torch._inductor imports Dynamo: a second that `import
    # inductor_fusions` does not spend.
    if name == "inductor_config":
        return importlib.import_module("torch._inductor.config")
    if name == "CustomGraphPass":
        return importlib.import_module("torch._inductor.custom_graph_pass").CustomGraphPass
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _config() -> Any:
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


def inductor_loaded() -> bool:
    """Whether Inductor's config is imported."""
    return "torch._inductor.config" in sys.modules


def when_inductor_loads(callback: Callable[[], None]) -> None:
    """Call `callback` now if Inductor's config is imported, else as soon as it is."""
    _when_loaded("torch._inductor.config", callback)


def _when_loaded(module: str, callback: Callable[[], None]) -> None:
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


#: What waits until the module of the passes is imported: its own import may be what imports Inductor.
deferred: list[Callable[[], None]] = []


def run_deferred() -> None:
    """Call what waited for the module of the passes."""
    while deferred:
        deferred.pop()()


#: Inductor's config hook of each stage.
HOOKS = {"pre_grad": "pre_grad_custom_pass", "post_grad": "post_grad_custom_pre_pass"}

OLDEST, NEWEST_TESTED = (2, 11), (2, 15)


def torch_version() -> tuple[int, int]:
    """(major, minor) of the torch in use."""
    match = re.match(r"(\d+)\.(\d+)", torch.__version__)
    if match is None:
        raise RuntimeError(f"cannot read the version of torch: {torch.__version__!r}")
    return int(match[1]), int(match[2])


def version_problem() -> str | None:
    """Why nothing can be registered with this torch, or None."""
    if torch_version() < OLDEST:
        return f"torch {torch.__version__} is older than {OLDEST[0]}.{OLDEST[1]}; no fusion is registered"
    return None


def missing_hook() -> str | None:
    """The name of a config hook that this torch does not have, or None."""
    return next((name for name in HOOKS.values() if not hasattr(_config(), name)), None)


def beyond_tested() -> bool:
    """True where this torch is newer than the newest one that the tests ran on."""
    return torch_version() > NEWEST_TESTED


def probe() -> None:
    """Call what every compile needs of torch's private parts; raises what they raise."""
    trace_id()
    compile_counters()
    cache_folder()
    bisecting()
    max_autotune()
    for stage in HOOKS:
        get_hook(stage)


@contextlib.contextmanager
def without_modes() -> Iterator[None]:
    """Tensors made inside are real ones on the CPU, whatever is being traced outside."""
    from torch.utils._python_dispatch import _disable_current_modes

    with _disable_current_modes(), torch.autocast("cpu", enabled=False):
        yield


# -- config hooks -------------------------------------------------------------------------------


def hooks_hold_lists() -> bool:
    """Whether a config hook takes a list of passes (torch 2.13 and later)."""
    return torch_version() >= (2, 13)


def get_hook(stage: str) -> list[Callable[..., Any]]:
    """The passes that the hook of `stage` holds now, in order."""
    return _as_list(getattr(_config(), HOOKS[stage]))


def update_hook(stage: str, change: Callable[[list[Any]], list[Any]]) -> None:
    """Replace the passes of a hook by `change(passes)`, for every thread.

    From 2.13 on a config value that is assigned belongs to the thread that assigned it. What all
    threads see, below that, is the value from the environment: ours goes there, and into the value of
    this thread where it has one. (The default would not do: each thread reads a copy of it.)
    """
    name = HOOKS[stage]
    entry = _config()._config[name]
    override = entry.user_override
    if not hasattr(override, "get"):
        setattr(_config(), name, _as_value(stage, change(get_hook(stage))))
        return
    from torch.utils._config_module import _UNSET_SENTINEL as UNSET

    shared = entry.default if entry.env_value_default is UNSET else entry.env_value_default
    passes = change(_as_list(shared))
    entry.env_value_default = _as_value(stage, passes) if passes else UNSET
    if override.get() is not UNSET:
        setattr(_config(), name, _as_value(stage, change(_as_list(override.get()))))


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


def patterns_ignore_the_scale() -> bool:
    """Whether Inductor's attention patterns take any divisor of the scores for sqrt(head_dim).

    Seen on 2.11; right on 2.13.
    """
    return torch_version() < (2, 13)


def patterns_take_tensors_for_numbers() -> bool:
    """Whether Inductor's attention patterns raise where the scores are divided by a tensor (pytorch#191203).

    Seen on 2.13; right on 2.15.
    """
    return torch_version() < (2, 15)


def drops_narrow_casts() -> bool:
    """Whether Inductor takes out a cast to a narrower dtype that another one widens again.

    Seen on 2.11; on 2.13 it stays, so that what is in memory is narrow.
    """
    return torch_version() < (2, 13)


# -- symbolic shapes and fake tensors -----------------------------------------------------------


def known_true(condition: Any) -> bool:
    """True where `condition` (a bool or a SymBool) holds without adding a guard."""
    if isinstance(condition, bool):
        return condition
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return bool(statically_known_true(condition))


def hint(size: Any) -> int:
    """The value of an int, or the hint of a SymInt, without adding a guard."""
    if isinstance(size, int):
        return size
    node = size.node
    return int(node.hint) if node.hint is not None else 1


def fake_mode_of(graph: fx.Graph) -> Any | None:
    """The FakeTensorMode under which the values of `graph` were made."""
    from torch._subclasses.fake_tensor import FakeTensor

    for node in graph.nodes:
        value = node.meta.get("example_value", node.meta.get("val"))
        if isinstance(value, FakeTensor):
            return value.fake_mode
    return None


def expression(size: torch.SymInt) -> Any:
    """The sympy expression of a symbolic size."""
    return size.node.expr


def symbol_parts(expression: Any) -> tuple[str, tuple[Any, ...]]:
    """("integer" | "symbol" | "add" | "mul" | "max" | "min" | "other", operands) of a sympy expression."""
    if expression.is_Integer:
        return "integer", ()
    if expression.is_Symbol:
        return "symbol", ()
    if expression.is_Add:
        return "add", tuple(expression.args)
    if expression.is_Pow and expression.exp.is_Integer and expression.exp > 0:
        return "mul", (expression.base,) * int(expression.exp)
    known = {"Max": "max", "Min": "min"}  # torch has classes of its own for them
    other = known.get(type(expression).__name__, "other")
    return ("mul" if expression.is_Mul else other), tuple(expression.args)


def is_batched(tensor: Any) -> bool:
    """Whether a fake value lives inside torch.vmap, with a dim that its shape does not show."""
    return isinstance(tensor, torch.Tensor) and bool(torch._C._functorch.is_batchedtensor(tensor))


def unbatched(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor of all samples behind a value inside torch.vmap."""
    while torch._C._functorch.is_batchedtensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether the elements of a fake value lie in memory once each, without gaps; adds no guard."""
    return bool(torch._prims_common.is_non_overlapping_and_dense_or_false(tensor))


def is_wrapper(tensor: Any) -> bool:
    """Whether a value is a tensor around others, such as a DTensor: not every operation is defined for it."""
    from torch.utils._python_dispatch import is_traceable_wrapper_subclass

    return isinstance(tensor, torch.Tensor) and bool(is_traceable_wrapper_subclass(tensor))


def is_body_of_dynamo(graph: fx.Graph) -> bool:
    """Whether a graph is the body of a higher-order operation that Dynamo traced.

    The inputs of a graph that Dynamo hands to a backend carry "tensor_dict"; those of a body are
    proxies that were created in the middle of tracing.
    """
    inputs = [node.meta for node in graph.nodes if node.op == "placeholder"]
    owner = getattr(graph, "owning_module", None)
    if "dynamo_compile_id" in getattr(owner, "meta", {}):
        return False
    return any("creation_timestamp" in meta for meta in inputs) and not any(
        "tensor_dict" in m for m in inputs
    )


@contextlib.contextmanager
def suppress_guards(fake_mode: Any | None) -> Iterator[None]:
    """Questions about sizes asked inside add no guard to the user's graph."""
    shape_env = getattr(fake_mode, "shape_env", None)
    with shape_env.suppress_guards() if shape_env is not None else contextlib.nullcontext():
        yield


@contextlib.contextmanager
def computing_fakes(fake_mode: Any | None) -> Iterator[None]:
    """Operations inside give fake values whose symbolic sizes stay symbolic, as in Dynamo.

    By the decompositions in Python: those in C++ make numbers of the batch of a matrix product (torch 2.11).
    """
    from torch._dispatch.python import enable_python_dispatcher

    with fake_mode if fake_mode is not None else contextlib.nullcontext(), enable_python_dispatcher():
        yield


# -- reports --------------------------------------------------------------------------------------


def compile_counters() -> Any:
    """torch._dynamo.utils.counters, imported late (importing dynamo is slow)."""
    from torch._dynamo.utils import counters

    return counters


def trace_id() -> tuple[str, int] | None:
    """(compile, attempt) of the compile that runs now; Dynamo abandons an attempt to start again."""
    from torch._guards import CompileContext

    current = CompileContext.current_trace_id()
    return None if current is None else (str(current.compile_id), int(current.attempt))


def trace_artifact(name: str, payload: Callable[[], str]) -> None:
    """Write a JSON artifact to TORCH_TRACE; tlparse shows it as `name`.json."""
    from torch._logging import trace_structured  # type: ignore[attr-defined]

    trace_structured("artifact", metadata_fn=lambda: {"name": name, "encoding": "json"}, payload_fn=payload)


def artifact_log(module: str, name: str) -> logging.Logger | None:
    """The log that TORCH_LOGS="<name>" switches on, or None where it is off or its name is not registered.

    The name is registered while torch is imported, by the entry point in the group "torch.backends", from
    torch 2.13 on.
    """
    from torch._logging import _internal as logs

    if name not in logs.log_registry.artifact_names or not logs.log_state.is_artifact_enabled(name):
        return None
    return logs.getArtifactLogger(module, name)


def rename(node: fx.Node, name: str) -> None:
    """Give a node another name, made unique in its graph."""
    node._rename(name)


# -- compiling for tests --------------------------------------------------------------------------


@contextlib.contextmanager
def fresh_compile() -> Iterator[None]:
    """Compile anew inside: no cache is read or written, no compiled code is kept from before."""
    import torch._dynamo

    torch._dynamo.reset()
    with _config().patch(force_disable_caches=True):
        yield
    torch._dynamo.reset()


def flex_attention_op() -> Any:
    """The higher-order operation that `torch.nn.attention.flex_attention` becomes in a graph."""
    return importlib.import_module("torch._higher_order_ops.flex_attention").flex_attention


def flex_backward_op() -> Any:
    """The higher-order operation that computes the gradients of flex attention."""
    return importlib.import_module("torch._higher_order_ops.flex_attention").flex_attention_backward


def only_traced_autograd_runs(graph: fx.Graph) -> bool:
    """Whether a graph calls nested compile regions, whose backward runs in a trace alone (before 2.13)."""
    if torch_version() >= (2, 13):
        return False
    region = importlib.import_module("torch._higher_order_ops.invoke_subgraph").invoke_subgraph
    return any(node.target is region for node in graph.nodes)


def trace_decomposed(
    fn: Callable[..., Any], values: Sequence[torch.Tensor], fake_mode: Any
) -> fx.GraphModule:
    """The operations that a function is made of, as a post-grad graph has them.

    Args:
        fn: a function of tensors that returns a tuple of tensors.
        values: its arguments, fake tensors of `fake_mode`.
    """
    from torch.fx.experimental.proxy_tensor import make_fx

    decomposition = importlib.import_module("torch._inductor.decomposition")
    with fake_mode, torch.no_grad(), suppress_guards(fake_mode):
        traced = make_fx(fn, decomposition_table=decomposition.select_decomp_table())(*values)
    traced.graph.eliminate_dead_code()
    return traced


def flex_block_mask(
    lengths: tuple[Any, Any], rows: Pair, full_rows: Pair, columns: Pair, full_columns: Pair,
    block: int | None, mask_mod: Any,
) -> tuple[Any, ...]:  # fmt: skip
    """The tuple that stands for a `BlockMask` in a call of the operation.

    Args:
        lengths: (q_len, kv_len).
        rows, full_rows: for each block of queries the number of blocks of keys that are partly and wholly
            visible, and their indices first in order.
        columns, full_columns: the reverse, for the backward.
        block: side of a block; None for one block that holds everything.
        mask_mod: graph of the mask.
    """
    flex = importlib.import_module("torch.nn.attention.flex_attention")
    side = flex._LARGE_SPARSE_BLOCK_SIZE if block is None else block
    # Orders of the backward's writes came between the indices and the sizes in 2.12: none is set.
    empty = flex._create_empty_block_mask(torch.empty(1, 1, 1, 1), torch.empty(1, 1, 1, 1)).as_tuple()
    orders = (None,) * (len(empty) - 13)
    return (*lengths, *rows, *full_rows, *columns, *full_columns, *orders, side, side, mask_mod)


def flex_on_cpu() -> bool:
    """Whether Inductor's C++ template of flex attention compiles here: it is written in vector code."""
    isa = importlib.import_module("torch._inductor.cpu_vec_isa").pick_vec_isa()
    return bool(isa) and torch.cpu._is_avx2_supported() and sys.platform != "darwin"


@contextlib.contextmanager
def compile_apart() -> Iterator[Callable[..., Any]]:
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
            _config().patch(force_disable_caches=True),
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
    """What Dynamo has compiled for a code object."""
    from torch._dynamo import eval_frame

    return list(eval_frame._debug_get_cache_entry_list(code))


def _drop(entry: Any) -> None:
    """As Dynamo does when an object that the compiled code depends on goes away."""
    from torch._dynamo.guards import DeletedGuardManagerWrapper

    manager, gone = entry.guard_manager, DeletedGuardManagerWrapper("compiled apart")
    if isinstance(manager, DeletedGuardManagerWrapper) or manager.extra_state is None:
        return
    # Its arguments changed after 2.13; where none of these fits, the entry stays, and matches nothing.
    for arguments in ((entry, gone), (entry, gone, manager), (gone, manager)):
        with contextlib.suppress(TypeError):
            manager.extra_state.invalidate(*arguments)
            return


def inductor() -> Callable[..., Any]:
    """A backend, equal to no other, that is Inductor."""

    def backend(graph: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        stock: Any = importlib.import_module("torch._inductor.compile_fx")
        return stock.compile_fx(graph, example_inputs)  # type: ignore[no-any-return]

    return backend


def passes_only() -> Callable[..., Any]:
    """A backend, equal to no other, that is Inductor up to its last pass and then runs aten operations.

    Every decision of a fusion is taken in a pass, so this shows them all without generating code.
    """

    def lower(graph: fx.GraphModule, example_inputs: Sequence[Any], **options: Any) -> Callable[..., Any]:
        from torch._inductor.virtualized import V
        from torch.fx import GraphModule

        stock: Any = importlib.import_module("torch._inductor.compile_fx")
        functorch: Any = importlib.import_module("functorch.compile")
        runs = GraphModule(graph, copy.deepcopy(graph.graph))
        mode = fake_mode_of(graph.graph)
        with contextlib.ExitStack() as stack:
            if mode is not None:
                stack.enter_context(V.set_fake_mode(mode))
            stock.view_to_reshape(graph)
            stock._recursive_post_grad_passes(graph, is_inference=bool(options.get("is_inference")))
        return functorch.make_boxed_func(runs.forward)  # type: ignore[no-any-return]

    def backend(graph: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        stock: Any = importlib.import_module("torch._inductor.compile_fx")
        return stock.compile_fx(graph, example_inputs, inner_compile=lower)  # type: ignore[no-any-return]

    return backend


# -- caches and bisecting -------------------------------------------------------------------------


def cache_folder() -> Path | None:
    """Where Inductor keeps what it compiled, or None where it is told to keep nothing."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    config = _config()
    if config.force_disable_caches or not config.fx_graph_cache:
        return None
    return Path(cache_dir())


#: Our part of Inductor, as torch's compiler bisector calls it.
BISECTED = "inductor_fusions"


def join_bisector() -> None:
    """Let torch's compiler bisector try Inductor without some of the fused sites, before anything else."""
    from torch._inductor import compiler_bisector as bisector

    parts = bisector.BACKENDS["inductor"]
    if not any(part.name == BISECTED for part in parts):
        parts.insert(0, bisector.BisectSubsystem(BISECTED))


def bisecting() -> bool:
    """Whether torch's compiler bisector looks for one of our sites now."""
    bisector = sys.modules.get("torch._inductor.compiler_bisector")
    if bisector is None or not bisector.CompilerBisector.bisection_enabled:
        return False
    return bool(bisector.CompilerBisector.get_subsystem() == BISECTED)


def bisected_away(describe: Callable[[], str]) -> bool:
    """Whether torch's compiler bisector wants this site unfused."""
    if not bisecting():
        return False
    from torch._inductor.compiler_bisector import CompilerBisector

    return bool(CompilerBisector.disable_subsystem("inductor", BISECTED, describe))


# -- lowering operations of ours ------------------------------------------------------------------


def decompose_in_graphs(op: Any, fn: Callable[..., Any]) -> None:
    """Have an operation of ours traced as `fn` where AOTAutograd makes a graph: Inductor sees its kernels.

    As torch.library.triton_op, which imports Inductor at once, and so cannot be used while that is imported.
    `torch.export` keeps the operation.

    Args:
        op: what torch.library.custom_op returned.
        fn: the same in functions of torch and kernels in torch.library.wrap_triton.
    """
    from torch._subclasses.fake_tensor import FakeTensor
    from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode

    def decompose(mode: Any, overload: Any, types: Any, args: Any, kwargs: Any) -> Any:
        from torch.export._trace import custom_triton_ops_decomposition_disabled

        if custom_triton_ops_decomposition_disabled():
            return mode.__torch_dispatch__(overload, types, args, kwargs)
        if not all(issubclass(t, FakeTensor) or t in (torch.Tensor, FunctionalTensor) for t in types):
            return NotImplemented
        with mode:
            return fn(*args, **kwargs)

    op.register_torch_dispatch(FunctionalTensorMode, decompose)


def register_lowering_when_loaded(op: Any, lower: Callable[..., Any]) -> None:
    """Register `lower` as Inductor's lowering of an operation of ours, once Inductor has its own."""

    def register() -> None:
        lowering = importlib.import_module("torch._inductor.lowering")
        if op not in lowering.lowerings:
            lowering.register_lowering(op, type_promotion_kind=None)(lower)

    # Inductor may be in the middle of importing its lowerings; it imports the others later.
    for name in ("torch._inductor.lowering", "torch._inductor.graph", "torch._inductor.compile_fx"):
        spec = getattr(sys.modules.get(name), "__spec__", None)
        if not getattr(spec, "_initializing", False):
            _when_loaded(name, register)
            return


def passes_installed() -> bool:
    """Whether a pass of ours is in the post-grad hook: only then do caches know of our kernels."""
    return any(type(held).__module__.startswith("inductor_fusions.") for held in get_hook("post_grad"))


def max_autotune() -> bool:
    """Whether Inductor chooses between matrix products by measuring them."""
    return bool(_config().max_autotune or _config().max_autotune_gemm)


def call_lowering(op: Any, *args: Any) -> Any:
    """What Inductor makes of an operation."""
    lowering = importlib.import_module("torch._inductor.lowering")
    return lowering.lowerings[op](*args)


def call_eagerly(op: Any, *args: Any) -> Any:
    """A call of an operation as it is, from generated code."""
    lowering = importlib.import_module("torch._inductor.lowering")
    return lowering.fallback_handler(op, add_to_fallback_set=False)(*args)


def beside(values: Sequence[Any]) -> Any:
    """Matrices side by side, computed in one loop."""
    lowering = importlib.import_module("torch._inductor.lowering")
    return lowering.pointwise_cat(list(values), 1)


def realize(values: Sequence[Any]) -> list[Any]:
    """The same values in memory, with strides that stay as they are."""
    ir = importlib.import_module("torch._inductor.ir")
    found = []
    for value in values:
        value = ir.ExternKernel.realize_input(value)
        value.freeze_layout()
        found.append(value)
    return found


def value_key(value: Any) -> tuple[Any, ...]:
    """Equal for two values of Inductor that are one matrix in memory."""
    layout = value.get_layout()
    return (value.get_name(), tuple(layout.size), tuple(layout.stride), layout.offset)


def static(size: Any) -> Any:
    """A size of Inductor's as an int, where it is one."""
    return int(size) if getattr(size, "is_Integer", isinstance(size, int)) else size


@dataclasses.dataclass(frozen=True)
class Variant:
    """One configuration of a kernel template.

    Attributes:
        source: what Inductor's TritonTemplate takes.
        meta: constants of the kernel.
        num_warps, num_stages: as Triton has them.
        outputs: arguments of the kernel, at its end, that are outputs beside the first.
        early: whether it starts before the kernel in front of it ends, and waits in its own code.
    """

    source: str
    meta: dict[str, Any]
    num_warps: int
    num_stages: int
    outputs: tuple[str, ...]
    early: bool = False


def lower_to_template(
    name: str,
    inputs: Sequence[tuple[str, Any]],
    shapes: Sequence[tuple[Any, Any]],
    dtype: torch.dtype,
    device: torch.device,
    variants: Sequence[Variant],
    stock: Callable[..., torch.Tensor] | None,
    dtypes: Sequence[torch.dtype] = (),
    grid_sizes: Sequence[Any] = (),
) -> list[Any] | None:
    """One Triton kernel with one or several outputs.

    Args:
        name: of the kernel.
        inputs: its arguments by name, in memory.
        shapes: of its outputs, which are row-major.
        dtype, device: of its outputs.
        variants: its configurations; the fastest is taken where there are several.
        stock: what does the same without it, on tensors that are `inputs` and outputs: where
            given, it is measured as well.
        dtypes: of each output, where they differ.
        grid_sizes: pairs of sizes whose tiles are counted for the grid; `shapes` by default.

    Returns:
        The outputs; None where `stock` is faster.
    """
    each = list(dtypes) or [dtype] * len(shapes)
    row_major = [Output("", s, (s[1], 1), kind) for s, kind in zip(shapes, each, strict=True)]
    call_sizes = list(grid_sizes) or [size for shape in shapes for size in shape]
    return _lower(name, inputs, row_major, device, _tiles, call_sizes, variants, stock)


@dataclasses.dataclass(frozen=True)
class Output:
    """An output of a kernel: its argument (the first has none), sizes, strides and dtype."""

    name: str
    size: Sequence[Any]
    stride: Sequence[Any]
    dtype: torch.dtype


def lower_to_kernel(
    name: str,
    inputs: Sequence[tuple[str, Any]],
    outputs: Sequence[Output],
    device: torch.device,
    grid: Callable[..., Any],
    grid_sizes: Sequence[Any],
    variant: Variant,
) -> list[Any]:
    """One Triton kernel with outputs of any layout and a grid of its own.

    Args:
        name: of the kernel.
        inputs: its arguments by name, in memory.
        outputs: its outputs; those after the first are its last arguments.
        device: of its outputs.
        grid: called with `grid_sizes`, the constants of the kernel, `cdiv` and `min`.
        grid_sizes: sizes that the number of programs depends on.
        variant: its source and configuration.
    """
    made = _lower(name, inputs, outputs, device, grid, grid_sizes, [variant], None)
    assert made is not None
    return made


def _lower(
    name: str,
    inputs: Sequence[tuple[str, Any]],
    outputs: Sequence[Output],
    device: torch.device,
    grid: Callable[..., Any],
    call_sizes: Sequence[Any],
    variants: Sequence[Variant],
    stock: Callable[..., torch.Tensor] | None,
) -> list[Any] | None:
    ir = importlib.import_module("torch._inductor.ir")
    select = importlib.import_module("torch._inductor.select_algorithm")
    lowering = importlib.import_module("torch._inductor.lowering")
    first = outputs[0]
    layout = ir.FixedLayout(device, first.dtype, list(first.size), list(first.stride))
    more = [
        lowering.empty_strided(list(out.size), list(out.stride), dtype=out.dtype, device=device)
        for out in outputs[1:]
    ]
    nodes = [*(value for _, value in inputs), *more]
    choices: list[Any] = []
    for variant in variants:
        _template(name, variant.source, grid).maybe_append_choice(
            choices, input_nodes=tuple(nodes), layout=layout, call_sizes=list(call_sizes),
            num_warps=variant.num_warps, num_stages=variant.num_stages,
            **({"triton_meta": {"launch_pdl": True}} if variant.early else {}), **variant.meta,
        )  # fmt: skip
    if not choices:
        return None
    if stock is not None:
        choices.append(_extern(stock).bind(tuple(nodes), layout))
    chosen = select.autotune_select_algorithm(name, choices, nodes, layout, return_multi_template=False)
    output = chosen[0] if isinstance(chosen, tuple) else chosen
    buffer = output.data.data
    if not isinstance(buffer, ir.TritonTemplateBuffer):
        return None
    # Not given to the template itself: torch 2.11 lets only its own operations write into inputs.
    writes = [ir.MutationOutput(ir.NoneLayout(device=device), value, buffer) for value in more]
    if writes:
        buffer.mutated_inputs = more
        if hasattr(buffer, "mutation_outputs"):
            buffer.mutation_outputs = [*buffer.mutation_outputs, *writes]
        else:
            buffer.outputs = [*buffer.outputs, *writes]
    return [output, *more]


@functools.cache
def _symbolic_grid(grid: Callable[..., Any]) -> Any:
    select = importlib.import_module("torch._inductor.select_algorithm")
    return select.SymbolicGridFn(grid)


def _tiles(*sizes_and_meta: Any, cdiv: Any, min: Any) -> tuple[Any, int, int]:
    """The grid of a block GEMM."""
    *sizes, meta = sizes_and_meta
    pairs = list(zip(sizes[::2], sizes[1::2], strict=True))
    tiles = sum(cdiv(m, meta["BLOCK_M"]) * cdiv(n, meta["BLOCK_N"]) for m, n in pairs)
    tiles = tiles * meta.get("SPLITS", 1)
    return (min(tiles, meta["NUM_PROGRAMS"]) if "NUM_PROGRAMS" in meta else tiles, 1, 1)


_templates: dict[tuple[str, str], Any] = {}


def _template(name: str, source: str, grid: Callable[..., Any]) -> Any:
    """The TritonTemplate of a source; its registry wants each name once."""
    if (name, source) not in _templates:
        select = importlib.import_module("torch._inductor.select_algorithm")
        unique = f"{name}_{hashlib.sha256(source.encode()).hexdigest()[:12]}"
        _templates[name, source] = select.TritonTemplate(
            name=unique, grid=_symbolic_grid(grid), source=source
        )
    return _templates[name, source]


_externs: dict[Any, Any] = {}


def _extern(function: Callable[..., torch.Tensor]) -> Any:
    """An eager function as a choice of autotuning."""
    if function not in _externs:
        select = importlib.import_module("torch._inductor.select_algorithm")
        _externs[function] = select.ExternKernelChoice(
            function, name=f"{function.__name__}", has_out_variant=False
        )
    return _externs[function]
