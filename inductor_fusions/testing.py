"""Checks for tests, ours and those of your CI: what was fused, and how large its error is.

>>> from inductor_fusions import testing
>>> testing.assert_fusions(model, (ids,), expected={"attention": 12})
>>> testing.check(attention, (q, k, v), fused=1, kernel="is_causal")

Everything here compiles anew: no cache is read or written, and no compiled code is kept.
"""

from __future__ import annotations

import copy
import importlib
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from . import _inductor, config, reporting
from .reporting import Site

__all__ = ["EAGER_AFTER_PASSES", "Capture", "Checked", "assert_fusions", "capture", "check"]

#: Name of a backend that runs the passes on Dynamo's graph and then the graph as it is, without
#: Inductor's code generation. It shows verdicts and numbers of pre-grad fusions in a fraction of the time.
EAGER_AFTER_PASSES = "eager_after_passes"

Inputs = Sequence[Any] | Mapping[str, Any]


@dataclass(frozen=True)
class Capture:
    """What one compile and run gave.

    Attributes:
        outputs: what the function returned.
        grads: gradient of each differentiated tensor, None where it has none: inputs by position
            ("0", "1.key") or by keyword, parameters of a module by their name. Empty in inference.
        sites: the candidates that this compile met, in order.
        graphs: the graphs after the passes; only with `EAGER_AFTER_PASSES`.
        cotangents: what the floating outputs that require a gradient were differentiated with.
    """

    outputs: Any
    grads: dict[str, torch.Tensor | None]
    sites: list[Site]
    graphs: list[fx.GraphModule] = field(default_factory=list)
    cotangents: tuple[torch.Tensor, ...] = ()

    @property
    def tensors(self) -> list[torch.Tensor]:
        """Every tensor of `outputs`, in order."""
        return [leaf for leaf in pytree.tree_leaves(self.outputs) if isinstance(leaf, torch.Tensor)]

    @property
    def fused(self) -> list[Site]:
        """The sites that were fused."""
        return [site for site in self.sites if site.verdict == "fused"]

    def calls(self, name: str) -> list[fx.Node]:
        """Nodes of `graphs`, and of the bodies nested in them, that call a function or method `name`."""
        found = []
        for graph in self.graphs:
            for module in graph.modules():
                if isinstance(module, fx.GraphModule):
                    found += [node for node in module.graph.nodes if _target_name(node) == name]
        return found


@dataclass(frozen=True)
class Checked:
    """What `check` saw.

    Attributes:
        ours: the run with the fusions.
        stock: the run without them.
        errors: "output[i]" or the name of a gradient, as in `Capture.grads` -> (relative error against
            float64 of ours, that of stock).
    """

    ours: Capture
    stock: Capture
    errors: dict[str, tuple[float, float]]

    @property
    def sites(self) -> list[Site]:
        """The candidates that the compile with the fusions met."""
        return self.ours.sites


def capture(
    fn: Callable[..., Any],
    *args: Any,
    train: bool = False,
    dynamic: bool | None = None,
    policy: str = "always",
    backend: str = "inductor",
    cotangents: Sequence[torch.Tensor] | None = None,
    **kwargs: Any,
) -> Capture:
    """Compile `fn` in isolation, run it once, and tell what the fusions made of it.

    Compiles of other threads meanwhile would be counted as well.

    Args:
        fn: a function or a module.
        args: its arguments. Tensors are copied first (same strides), so `fn` may overwrite them.
        train: differentiate as well, with random cotangents (the same at each call) for every floating
            output that requires a gradient, with respect to the floating inputs and the parameters that
            require one. Else everything runs without gradients.
        dynamic: as in `torch.compile`.
        policy: "always" fuses whatever is proved, "profitable" what is measured to pay.
        backend: "inductor", any other name that `torch.compile` takes, or `EAGER_AFTER_PASSES`.
        cotangents: one for each floating output that requires a gradient, instead of the random ones.
        kwargs: keyword arguments of `fn`.

    Returns:
        Outputs, gradients and sites.
    """
    graphs: list[fx.GraphModule] = []
    how: Any = _AfterPasses(graphs) if backend == EAGER_AFTER_PASSES else backend
    with _inductor.fresh_compile(), config.patch(policy=policy), reporting.isolated() as sites:
        compiled = torch.compile(fn, dynamic=dynamic, backend=how)
        outputs, grads, used = _run(compiled, fn, args, kwargs, train, cotangents)
    return Capture(outputs, grads, sites, graphs, used)


def assert_fusions(
    fn: Callable[..., Any],
    args: Inputs = (),
    expected: Mapping[str, int] | None = None,
    *,
    train: bool = False,
    dynamic: bool | None = None,
    policy: str = "always",
    backend: str = "inductor",
) -> Capture:
    """Compile and run `fn`, and assert how many sites each fusion fused.

    Args:
        fn: a function or a module.
        args: its arguments, positional (a sequence) or by keyword (a mapping).
        expected: fusion -> number of fused sites, default one attention; a fusion that is not named
            must fuse nothing.
        train, dynamic, policy, backend: as in `capture`.

    Returns:
        The run.

    Raises:
        AssertionError: with every site, its verdict and its reason.
    """
    wanted = {"attention": 1} if expected is None else dict(expected)
    positional, keywords = _split(args)
    run = capture(fn, *positional, train=train, dynamic=dynamic, policy=policy, backend=backend, **keywords)
    found = Counter(site.fusion for site in run.fused)
    if +found != +Counter(wanted):
        raise AssertionError(f"fused {dict(found) or 'nothing'}, expected {wanted}\n{_listed(run.sites)}")
    return run


def check(
    fn: Callable[..., Any],
    inputs: Inputs,
    *,
    fused: int | None = 1,
    reason: str | None = None,
    kernel: str | None = None,
    train: bool = True,
    dtype: torch.dtype | None = None,
    factor: float = 1.5,
    slack: float = 1.0,
    dynamic: bool | None = None,
    policy: str = "always",
    backend: str = "inductor",
    reference: Callable[..., Any] | None = None,
) -> Checked:
    """Assert that `fn` compiled with the fusions is about as exact as compiled without them.

    The reference is `fn` on double copies of the inputs (of the module, where `fn` is one), run eagerly;
    where `fn` asks for another floating dtype it gets double all the same. Every floating output and every
    gradient `x` must satisfy

        ||x - ref|| / ||ref||  <=  factor * (the same for stock)  +  slack * eps(dtype of x)

    where stock is the same compile under `config.patch(enabled=False)`. All runs get the same cotangents.
    A gradient that vanishes in exact arithmetic (that of a key's bias, say), below 1e-6 of the largest one,
    is nothing but rounding in every run: its error is taken relative to the largest gradient, and its budget
    is the one of the least exact tensor.

    Outputs that are not floating point must be those of stock, and no fusion may raise. `fn` must not draw
    random numbers, and tensors that it closes over are not doubled: pass them as inputs.

    Args:
        fn: a function or a module.
        inputs: its arguments, positional (a sequence) or by keyword (a mapping).
        fused: number of sites to be fused; None does not count them.
        reason: text within the reason of at least one site that was not fused.
        kernel: text within the kernel of every fused site.
        train: differentiate with respect to the inputs and parameters that require a gradient.
        dtype: what the floating inputs and the module are cast to first; None leaves them.
        factor, slack: the budget above. One eps is for rounding the result itself: where stock is exact
            by luck, no factor would be enough.
        dynamic, policy, backend: as in `capture`. With `EAGER_AFTER_PASSES`, stock is `fn` itself.
        reference: what is run in double instead of `fn`, on the same inputs.

    Returns:
        Both runs and their errors.

    Raises:
        AssertionError: with every error and every site.
    """
    positional, keywords = _split(inputs)
    if dtype is not None:
        positional, keywords = _cast((positional, keywords), dtype)
        fn = copy.deepcopy(fn).to(dtype) if isinstance(fn, nn.Module) else fn
    with config.patch(enabled=False):
        if backend == EAGER_AFTER_PASSES:
            outputs, grads, cotangents = _run(fn, fn, positional, keywords, train, None)
            stock = Capture(outputs, grads, [], [], cotangents)
        else:
            stock = capture(
                fn, *positional, train=train, dynamic=dynamic, policy=policy, backend=backend, **keywords
            )
    ours = capture(
        fn, *positional, train=train, dynamic=dynamic, policy=policy, backend=backend,
        cotangents=stock.cotangents, **keywords,
    )  # fmt: skip
    exact = fn if reference is None else reference
    exact = copy.deepcopy(exact).double() if isinstance(exact, nn.Module) else exact
    wide, wide_keywords = _cast((positional, keywords), torch.float64)
    doubled = [c.double() for c in stock.cotangents]
    with _Exact():
        true = Capture(*_run(exact, exact, wide, wide_keywords, train, doubled)[:2], [])

    problems = _site_problems(ours.sites, fused, reason, kernel)
    rows = _paired(ours, stock, true)
    largest = max((float(z.double().norm()) for name, _, _, z in rows if name in ours.grads), default=0.0)
    errors: dict[str, tuple[float, float]] = {}
    vanishing = set()
    for name, x, y, z in rows:
        if not x.is_floating_point():
            if not torch.equal(x, y):
                problems.append(f"{name} is not that of stock")
            continue
        norm = float(z.double().norm())
        if name in ours.grads and norm < 1e-6 * largest:
            vanishing.add(name)
            norm = largest
        errors[name] = _error(x, z, norm), _error(y, z, norm)
    worst = max((theirs for _, theirs in errors.values()), default=0.0)
    for name, x, _, _ in rows:
        if name not in errors:
            continue
        mine, theirs = errors[name]
        theirs = worst if name in vanishing else theirs
        budget = factor * theirs + slack * torch.finfo(x.dtype).eps
        if not mine <= budget:  # also where it is NaN
            what = f"gradient of {name}" if name in ours.grads else name
            problems.append(f"{what}: error {mine:.2e}, stock {theirs:.2e}, budget {budget:.2e}")
    if problems:
        table = "\n".join(f"  {n}: ours {a:.2e}, stock {b:.2e}" for n, (a, b) in errors.items())
        raise AssertionError("\n".join([*problems, "errors against float64:", table, _listed(ours.sites)]))
    return Checked(ours, stock, errors)


# -- running --------------------------------------------------------------------------------------


class _Exact(TorchFunctionMode):
    """Computes in float64 whatever floating dtype is asked for: in casts, of factories, by default."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func in (torch.Tensor.float, torch.Tensor.half, torch.Tensor.bfloat16):
            func = torch.Tensor.double
        kwargs = {name: self._wide(value) for name, value in (kwargs or {}).items()}
        return func(*map(self._wide, args), **kwargs)

    @staticmethod
    def _wide(value: Any) -> Any:
        return torch.float64 if isinstance(value, torch.dtype) and value.is_floating_point else value

    def __enter__(self) -> Any:
        self._default = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        torch.set_default_dtype(self._default)


class _AfterPasses:
    """A backend of `torch.compile`: the pre-grad passes that Inductor would run, then the graph itself."""

    def __init__(self, graphs: list[fx.GraphModule]) -> None:
        self.graphs = graphs

    def __call__(self, graph: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        self._transform(graph)
        self.graphs.append(graph)
        if not any(isinstance(x, (torch.SymInt, torch.SymFloat)) for x in map(_value, graph.graph.nodes)):
            return graph.forward
        # Symbolic sizes in the graph only mean something to AOTAutograd, which traces it once more.
        functorch: Any = importlib.import_module("functorch.compile")

        def as_it_is(traced: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
            return functorch.make_boxed_func(traced.forward)  # type: ignore[no-any-return]

        return functorch.aot_module_simplified(graph, example_inputs, fw_compiler=as_it_is)  # type: ignore[no-any-return]

    def _transform(self, graph: fx.GraphModule) -> None:
        """Bodies first, as Inductor does."""
        names = sorted({str(node.target) for node in graph.graph.nodes if node.op == "get_attr"})
        for name in names:
            body = getattr(graph, name, None)
            if isinstance(body, fx.GraphModule):
                self._transform(body)
        for item in _inductor.get_hook("pre_grad"):
            item(graph.graph)
        graph.graph.lint()
        graph.recompile()


def _value(node: fx.Node) -> Any:
    return node.meta.get("example_value")


def _run(
    run: Callable[..., Any],
    fn: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    train: bool,
    cotangents: Sequence[torch.Tensor] | None,
) -> tuple[Any, dict[str, torch.Tensor | None], tuple[torch.Tensor, ...]]:
    """(outputs, gradients, cotangents) of `run`, which is `fn` or `fn` compiled."""
    args, kwargs = _copied((tuple(args), dict(kwargs)), train)
    if not train:
        with torch.no_grad():
            return run(*args, **kwargs), {}, ()
    leaves = _leaves(fn, args, kwargs)
    outputs = run(*args, **kwargs)
    tensors = [
        leaf
        for leaf in pytree.tree_leaves(outputs)
        if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() and leaf.requires_grad
    ]
    if cotangents is None:
        cotangents = [_cotangent(i, tensor) for i, tensor in enumerate(tensors)]
    if len(cotangents) != len(tensors):
        raise AssertionError(f"{len(tensors)} outputs require a gradient, not {len(cotangents)}")
    grads: dict[str, torch.Tensor | None] = dict.fromkeys(leaves)
    if tensors and leaves:
        given = [c.to(t.dtype) for c, t in zip(cotangents, tensors, strict=True)]
        found = torch.autograd.grad(tensors, list(leaves.values()), given, allow_unused=True)
        grads = dict(zip(leaves, found, strict=True))
    return pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, outputs), grads, tuple(cotangents)


def _cotangent(index: int, tensor: torch.Tensor) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 + index)
    values = torch.randn(tensor.shape, dtype=torch.float64, generator=generator)
    return values.to(tensor.device, tensor.dtype)


def _leaves(fn: Callable[..., Any], args: Any, kwargs: Any) -> dict[str, torch.Tensor]:
    """The tensors to differentiate with respect to, by name."""
    found: dict[str, torch.Tensor] = {}
    for where in (list(args), kwargs):
        for path, leaf in pytree.tree_flatten_with_path(where)[0]:
            if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
                found[".".join(_step(key) for key in path)] = leaf
    if isinstance(fn, nn.Module):
        found.update((name, p) for name, p in fn.named_parameters() if p.requires_grad)
    return found


def _step(key: Any) -> str:
    """One step of a path in a tree of arguments: an index, a key or a field."""
    named = [getattr(key, name) for name in ("idx", "key", "name") if hasattr(key, name)]
    return str(named[0] if named else key)


def _copied(tree: Any, train: bool) -> Any:
    """The same tree with copies of its tensors, as leaves; one tensor given twice stays one."""
    memo: dict[int, torch.Tensor] = {}

    def one(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in memo:
            with torch.no_grad():
                data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
                storage = tensor.untyped_storage().clone()
                data.set_(storage, tensor.storage_offset(), tensor.size(), tensor.stride())
            for name in [name for name in vars(tensor) if name.startswith("_dynamo_")]:  # marked dynamic
                setattr(data, name, getattr(tensor, name))
            memo[id(tensor)] = data.requires_grad_(train and tensor.requires_grad)
        return memo[id(tensor)]

    return pytree.tree_map_only(torch.Tensor, one, tree)


def _cast(tree: Any, dtype: torch.dtype) -> Any:
    def one(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_floating_point() or tensor.dtype == dtype:
            return tensor
        return tensor.detach().to(dtype).requires_grad_(tensor.requires_grad)

    return pytree.tree_map_only(torch.Tensor, one, tree)


def _split(inputs: Inputs) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return ((), dict(inputs)) if isinstance(inputs, Mapping) else (tuple(inputs), {})


# -- comparing ------------------------------------------------------------------------------------


def _paired(
    ours: Capture, stock: Capture, true: Capture
) -> list[tuple[str, torch.Tensor, torch.Tensor, torch.Tensor]]:
    """(name, ours, stock, reference) of every output and gradient."""
    outputs = ours.tensors, stock.tensors, true.tensors
    if len({len(tensors) for tensors in outputs}) != 1:
        raise AssertionError(f"different numbers of outputs: {[len(tensors) for tensors in outputs]}")
    found = []
    for i, (x, y, z) in enumerate(zip(*outputs, strict=True)):
        if x.shape != y.shape or x.dtype != y.dtype:
            raise AssertionError(
                f"output {i} is {x.dtype} {tuple(x.shape)}, of stock {y.dtype} {tuple(y.shape)}"
            )
        found.append((f"output[{i}]", x, y, z))
    for name in ours.grads:
        triple = [run.grads[name] for run in (ours, stock, true)]
        shown = next((t for t in triple if t is not None), None)
        if shown is not None:
            x, y, z = (torch.zeros_like(shown) if t is None else t for t in triple)
            found.append((name, x, y, z))
    return found


def _error(x: torch.Tensor, true: torch.Tensor, norm: float) -> float:
    """Distance from the reference in the Euclidean norm, relative to `norm` where that is not zero."""
    return float((x.double() - true.double()).norm()) / (norm if norm > 0 and math.isfinite(norm) else 1.0)


def _site_problems(
    sites: Sequence[Site], fused: int | None, reason: str | None, kernel: str | None
) -> list[str]:
    ours = [site for site in sites if site.verdict == "fused"]
    found = [f"a fusion raised: {site.reason}" for site in sites if site.verdict == "failed"]
    if fused is not None and len(ours) != fused:
        found.append(f"{len(ours)} sites were fused, expected {fused}")
    if reason is not None and not any(reason in s.reason for s in sites if s.verdict != "fused"):
        found.append(f"no site was left with the reason {reason!r}")
    if kernel is not None and not all(kernel in site.kernel for site in ours):
        found.append(f"a fused site has a kernel without {kernel!r}")
    return found


def _listed(sites: Sequence[Site]) -> str:
    return "\n".join(["sites:", *(f"  {site}" for site in sites)]) if sites else "no candidate was seen"


def _target_name(node: fx.Node) -> str:
    if node.op not in ("call_function", "call_method"):
        return ""
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
