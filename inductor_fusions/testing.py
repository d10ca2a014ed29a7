"""Checks for your tests and ours: what was fused, and how large its error is.

>>> from inductor_fusions import testing
>>> testing.assert_fusions(model, (ids,), expected={"attention": 12})
>>> testing.check(attention, (q, k, v), fused=1, kernel="is_causal")

Everything here compiles from scratch: no cache is read or written, and no compiled code is kept.
"""

from __future__ import annotations

import copy
import functools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn

from . import _inductor, config, reporting
from .checking import budget
from .checking.after_passes import AfterPasses
from .checking.runs import Inputs, cast, exact, near, run, split
from .reasons import Reason
from .reporting import Report, Site
from .sites import table, text

__all__ = [
    "EAGER_AFTER_PASSES",
    "Capture",
    "Checked",
    "assert_close_to_eager",
    "assert_counts",
    "assert_fusions",
    "capture",
    "check",
]

#: Name of a backend that runs the passes on Dynamo's graph and then the graph as it is, without
#: Inductor's code generation. It shows verdicts and numbers of pre-grad fusions in a fraction of the time.
EAGER_AFTER_PASSES = "eager_after_passes"


@dataclass(frozen=True)
class Capture(budget.Values):
    """The result of one compile and run.

    Attributes:
        outputs: what the function returned.
        grads: the gradient, or None, of each differentiated tensor: inputs by position ("0", "1.key") or by
            keyword, parameters of a module by name. Empty in inference.
        sites: the candidates of this compile, in order.
        graphs: the graphs after the passes; only with `EAGER_AFTER_PASSES`.
        cotangents: the incoming gradients of the floating outputs that require a gradient.
    """

    outputs: Any
    grads: dict[str, torch.Tensor | None]
    sites: list[Site]
    graphs: list[fx.GraphModule] = field(default_factory=list)
    cotangents: tuple[torch.Tensor, ...] = ()

    @property
    def fused(self) -> list[Site]:
        """The sites that were fused."""
        return [site for site in self.sites if site.verdict == "fused"]

    def calls(self, name: str) -> list[fx.Node]:
        """Nodes of `graphs`, and of the bodies nested in them, that call a function or method `name`."""
        modules = [module for graph in self.graphs for module in graph.modules()]
        bodies = [module.graph for module in modules if isinstance(module, fx.GraphModule)]
        return [node for body in bodies for node in body.nodes if _target_name(node) == name]


@dataclass(frozen=True)
class Checked:
    """The result of `check`.

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
        """The candidates of the compile with the fusions."""
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
    """Compile `fn` in isolation, run it once, and collect its sites.

    Do not compile in other threads meanwhile: their sites would be collected too.

    Args:
        fn: a function or a module.
        args: its arguments. Tensors are copied first (same strides), so `fn` may overwrite them.
        train: also compute the gradients of the floating inputs and parameters that require one, with random
            incoming gradients (cotangents) that are the same at each call. If False, everything runs without
            gradients.
        dynamic: as in `torch.compile`.
        policy: "always" fuses whatever is proved to be correct, "profitable" what is expected to be faster.
        backend: "inductor", any other name that `torch.compile` takes, or `EAGER_AFTER_PASSES`.
        cotangents: incoming gradients, one for each floating output that requires a gradient.
        kwargs: keyword arguments of `fn`.

    Returns:
        Outputs, gradients and sites.

    Raises:
        ValueError: the policy is unknown.
    """
    config.check_policy(policy)
    graphs: list[fx.GraphModule] = []
    how: Any = AfterPasses(graphs) if backend == EAGER_AFTER_PASSES else backend
    with _inductor.fresh_compile(), config.patch(policy=policy), reporting.isolated() as sites:
        compiled = torch.compile(fn, dynamic=dynamic, backend=how)
        outputs, grads, used = run(compiled, fn, args, kwargs, train, cotangents)
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
        expected: fusion -> number of fused sites; by default one attention. A fusion that is not named must
            fuse nothing.
        train, dynamic, policy, backend: as in `capture`.

    Returns:
        The run.

    Raises:
        AssertionError: with every site, its verdict and its reason.
    """
    wanted = {"attention": 1} if expected is None else dict(expected)
    positional, keywords = split(args)
    captured = capture(
        fn, *positional, train=train, dynamic=dynamic, policy=policy, backend=backend, **keywords
    )
    assert_counts(captured.sites, wanted)
    return captured


def assert_counts(sites: Sequence[Site], expected: Mapping[str, int]) -> None:
    """Assert how many of these sites each fusion fused. A fusion that is not named must have fused nothing.

    Fusions that only avoid wrong kernels (`Fusion.protects`) are counted only if they are named.

    Raises:
        AssertionError: with every site, its verdict and its reason.
    """
    found = Counter(site.fusion for site in sites if site.verdict == "fused")
    for name in _protecting() - expected.keys():
        del found[name]
    if +found != +Counter(dict(expected)):
        what = f"fused {dict(found) or 'nothing'}, expected {dict(expected)}"
        raise AssertionError(f"{what}\n{_listed(sites)}")


def check(
    fn: Callable[..., Any],
    inputs: Inputs,
    *,
    fused: int | None = 1,
    reason: str | None = None,
    kernel: str | None = None,
    train: bool = True,
    dtype: torch.dtype | None = None,
    factor: float = budget.FACTOR,
    slack: float = budget.SLACK,
    dynamic: bool | None = None,
    policy: str = "always",
    backend: str = "inductor",
    reference: Callable[..., Any] | None = None,
) -> Checked:
    """Assert that `fn` compiled with the fusions is about as exact as compiled without them.

    The reference is `fn` run eagerly on copies of the inputs (and of the module) in float64; if `fn` asks for
    another floating dtype, it gets float64 too. Every floating output and every gradient `x` must satisfy

        ||x - ref|| / ||ref||  <=  factor * (the same for stock)  +  slack * eps(dtype of x)

    where stock is the same compile under `config.patch(enabled=False)`. All runs get the same cotangents.
    `checking.budget` says what holds for gradients that vanish, and for errors over budget by chance. No
    fusion may raise. `fn` must not draw random numbers. Tensors that it closes over are not converted to
    float64: pass them as inputs.

    Args:
        fn: a function or a module.
        inputs: its arguments, positional (a sequence) or by keyword (a mapping).
        fused: number of sites to be fused; None does not count them.
        reason: a code of docs/reasons.md, or a part of the message, of at least one site that was not fused.
        kernel: text within the kernel of every fused site.
        train: differentiate with respect to the inputs and parameters that require a gradient.
        dtype: cast the floating inputs and the module to this dtype first; None: do not cast.
        factor: of the budget above.
        slack: of the budget above; one eps is for rounding the result itself.
        dynamic, policy, backend: as in `capture`. With `EAGER_AFTER_PASSES`, stock is `fn` itself.
        reference: the function to run in float64 instead of `fn`, on the same inputs.

    Returns:
        Both runs and their errors.

    Raises:
        AssertionError: with every error and every site.
    """
    positional, keywords = split(inputs)
    if dtype is not None:
        positional, keywords = cast((positional, keywords), dtype)
        fn = copy.deepcopy(fn).to(dtype) if isinstance(fn, nn.Module) else fn
    options: dict[str, Any] = dict(train=train, dynamic=dynamic, policy=policy, backend=backend)
    given, eager = (positional, keywords), backend == EAGER_AFTER_PASSES
    ours, stock, errors = _judged(fn, reference or fn, given, options, eager, factor, slack)
    problems = _site_problems(ours.sites, fused, reason, kernel) + budget.problems(errors)
    _assert_none(problems, errors, ("ours", "stock"), ours.sites)
    return Checked(ours, stock, {error.name: (error.ours, error.stock) for error in errors})


def assert_close_to_eager(
    fn: Callable[..., Any],
    args: Inputs = (),
    *,
    train: bool = True,
    factor: float = budget.FACTOR,
    slack: float = 4.0,
    dynamic: bool | None = None,
    policy: str = "always",
    keywords: Mapping[str, Any] | None = None,
) -> Capture:
    """Assert that `fn` compiled with the fusions is about as exact as `fn` run eagerly.

    As in `check`, but relative to eager instead of stock, with a wider budget, because compiled code rounds
    at other places.

    Args:
        fn: a function or a module that draws no random numbers.
        args: its arguments, positional (a sequence) or by keyword (a mapping).
        train: also compare gradients.
        factor: allowed multiple of eager's error.
        slack: allowed number of eps of the dtype in addition.
        dynamic, policy: as in `capture`.
        keywords: keyword arguments beside positional ones.

    Returns:
        The compiled run.

    Raises:
        AssertionError: with every error and every site.
    """
    positional, named = split(args)
    given = (positional, {**named, **(keywords or {})})
    options: dict[str, Any] = dict(train=train, dynamic=dynamic, policy=policy)
    ours, _, errors = _judged(fn, fn, given, options, True, factor, slack)
    found = _site_problems(ours.sites, None, None, None) + budget.problems(errors)
    _assert_none(found, errors, ("compiled", "eager"), ours.sites)
    return ours


def _judged(
    fn: Callable[..., Any],
    reference: Callable[..., Any],
    given: tuple[Any, Any],
    options: dict[str, Any],
    eager: bool,
    factor: float,
    slack: float,
) -> tuple[Capture, Capture, list[budget.Error]]:
    """The run with the fusions, the one without them, and the errors.

    Args:
        given: positional and keyword arguments.
        options: of `capture`.
        eager: whether the run without the fusions is `fn` itself.
    """

    @functools.cache
    def stock(sample: int) -> Capture:
        args, kwargs = near(given, sample)
        with config.patch(enabled=False):
            if not eager:
                return capture(fn, *args, **options, **kwargs)
            outputs, grads, cotangents = run(fn, fn, args, kwargs, options["train"])
        return Capture(outputs, grads, [], [], cotangents)

    @functools.cache
    def ours(sample: int) -> Capture:
        args, kwargs = near(given, sample)
        return capture(fn, *args, **options, cotangents=stock(sample).cotangents, **kwargs)

    def true(sample: int) -> budget.Values:
        args, kwargs = near(given, sample)
        return budget.Values(*exact(reference, args, kwargs, options["train"], stock(sample).cotangents)[:2])

    errors = budget.judge(ours, stock, true, factor, slack)
    return ours(0), stock(0), errors


# -- what is wrong ---------------------------------------------------------------------------------


def _assert_none(
    problems: Sequence[str], errors: Sequence[budget.Error], names: tuple[str, str], sites: Sequence[Site]
) -> None:
    if problems:
        first, second = names
        lines = (f"  {each.name}: {first} {each.ours:.2e}, {second} {each.stock:.2e}" for each in errors)
        raise AssertionError("\n".join([*problems, "errors against float64:", *lines, _listed(sites)]))


def _site_problems(
    sites: Sequence[Site], fused: int | None, reason: str | None, kernel: str | None
) -> list[str]:
    ours = [site for site in sites if site.verdict == "fused" and site.fusion not in _protecting()]
    found = [f"a fusion raised: {site.reason}" for site in sites if site.verdict == "failed"]
    if fused is not None and len(ours) != fused:
        found.append(f"{len(ours)} sites were fused, expected {fused}")
    if reason is not None and not any(says(s, reason) for s in sites if s.verdict != "fused"):
        found.append(f"no site was left with the reason {reason!r}")
    if kernel is not None and not all(kernel in site.kernel for site in ours):
        found.append(f"a fused site has a kernel without {kernel!r}")
    return found


def says(site: Site, reason: str) -> bool:
    """Whether a site has this code or, if it is not a code, these words in its message."""
    return site.code == reason if reason in {each.code for each in Reason} else reason in site.reason


@functools.lru_cache
def _protecting() -> frozenset[str]:
    """Names of the fusions that only keep a graph from a kernel that is wrong."""
    from . import fusions

    return frozenset(fusion.name for fusion in fusions.ALL if fusion.protects)


def _listed(sites: Sequence[Site]) -> str:
    return f"sites:\n{text(table(sites), width=180)}{Report(list(sites)).summary()}"


def _target_name(node: fx.Node) -> str:
    target = node.target if node.op in ("call_function", "call_method") else ""
    return target if isinstance(target, str) else getattr(target, "__name__", "")
