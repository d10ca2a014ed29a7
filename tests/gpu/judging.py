"""What must hold of a program on a device: eager mode in float64 says what is right, eager mode and stock in
the dtype how large an error of rounding is."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._inductor import config as inductor_config
from torch.utils import _pytree as pytree

from bench.common import is_fatal
from inductor_fusions import _inductor, config, reporting
from inductor_fusions.checking.runs import Float64Mode, copied, leaves, near
from tests.gpu.moving import HALF, Program, device_of, mapping

#: Of the random numbers that a program draws.
SEED = 3
#: Runs of eager mode, on inputs that differ by a thousandth, that say how large an error of rounding is.
SAMPLES = 3
#: An error may be so many times the largest one of eager mode and stock,
FACTOR = 2.0
#: plus so many eps of its dtype: sums of terms that cancel, and backwards that compute the weights anew.
SLACK = {torch.float32: 64.0, torch.float64: 64.0}
SLACK_OF_HALF = 4.0
#: The same where a gradient vanishes, of the largest tensor: with one key, flex attention's dQ is rounding.
SLACK_OF_CANCELLED = 4.0
#: A gradient this small beside the largest tensor is nothing but rounding.
VANISHING = 1e-6
#: Of incoming gradients: as the outputs, dims in front exchanged, dims behind exchanged.
LAYOUTS = (0, 1, 2)

Run = dict[str, torch.Tensor | None]


@dataclass
class Verdict:
    """What became of a program.

    Attributes:
        dtype: "bfloat16", "float16", "float32"; "own" where it runs only as the test has it.
        train: whether it was differentiated.
        left: why it was not judged, or "".
        problem: what is wrong, with the fusions alone.
        stock_wrong: what is wrong, where it is so without the fusions as well.
        sites: fusion -> fused sites.
        draws: it draws random numbers: dtypes, shapes, strides and whether values are finite were judged.
    """

    dtype: str
    train: bool
    left: str = ""
    problem: str = ""
    stock_wrong: str = ""
    sites: dict[str, int] = field(default_factory=dict)
    draws: bool = False


def judge(
    program: Program,
    device: str,
    dtype: torch.dtype,
    train: bool,
    stock_first: bool = False,
    padded: bool = False,
) -> tuple[Verdict, Program | None]:
    """Compile and run a program with the fusions, and compare it with eager mode.

    Args:
        program: as a test has it.
        dtype: of its tensors, where it runs in eager mode so; else their own.
        train: differentiate it, where eager mode can.
        stock_first: compile it without the fusions first, to see whether stock breaks the process.
        padded: have Inductor pad every product whose sizes are odd; else it measures whether that pays.

    Returns:
        The verdict, and the program as it ran.
    """
    name = str(dtype).removeprefix("torch.")
    ways = [(name, mapping(program.dtypes(), dtype)), ("own", {})]
    reason = ""
    for (kind, dtypes), training in itertools.product(ways, (True, False) if train else (False,)):
        moved = program.cast(device, dtypes)
        try:
            judged = _Judged(moved, training, padded)
        except _Refused as error:
            reason = reason or str(error)
            continue
        verdict = Verdict(kind, training, draws=judged.draws)
        if stock_first:
            try:
                found, _, _ = judged.compiled(enabled=False)
            except Exception as error:
                if not is_fatal(error):
                    raise
                verdict.stock_wrong = f"{type(error).__name__}: {str(error).strip()[:300]}"
                return verdict, moved
            if broken():
                verdict.stock_wrong = judged.problem(found)
                return verdict, moved
        judged.decide(verdict)
        return verdict, moved
    return Verdict(name, train, left=reason), None


class _Refused(Exception):
    """The program does not run in eager mode, or gives nothing to compare."""


class _Judged:
    """A program with what eager mode makes of it."""

    def __init__(self, program: Program, train: bool, padded: bool) -> None:
        self.program, self.train, self.padded = program, train, padded
        wide = program.cast(device_of(program), dict.fromkeys((torch.float32, *HALF), torch.float64))
        if program.reference is not None:
            wide.fn = wide.reference or wide.fn
        try:
            self.before = _tensors((program.args, program.kwargs))
            first = self.run(program.fn)
            self.eager, self.cotangents, self.strides = first.values, first.cotangents, first.strides
            self.draws = not _same(self.eager, self.run(program.fn, seed=SEED + 1).values)
            self.noise = dict.fromkeys(self.eager, 0.0)
            self.true: list[Run] = []
            if not self.draws:
                for sample in range(SAMPLES):
                    with Float64Mode():
                        self.true.append(self.run(wide.fn, sample, wide).values)
                    self.add_noise(self.run(program.fn, sample).values, self.true[-1])
        except _Refused:
            raise
        except Exception as error:
            if is_fatal(error):
                raise
            raise _Refused(f"{type(error).__name__} in eager mode") from error
        if not self.eager:
            raise _Refused("no tensors come out")
        if train and not any(name.startswith("gradient") for name in self.eager):
            raise _Refused("nothing to differentiate")
        self.exact = self.eager if self.draws else self.true[0]

    def run(
        self,
        call: Callable[..., Any],
        sample: int = 0,
        program: Program | None = None,
        seed: int = SEED,
        layout: int = 0,
    ) -> _Ran:
        """The program's results by one of its forms."""
        program = program or self.program
        given = getattr(self, "cotangents", None)
        return execute(call, program, self.train, given, sample, seed, layout)

    def add_noise(self, values: Run, true: Run) -> None:
        """An error that rounding makes."""
        for name in self.noise:
            error = _distance(values.get(name), true.get(name))
            if math.isfinite(error):
                self.noise[name] = max(self.noise[name], error)

    def decide(self, verdict: Verdict) -> None:
        """Fill in a verdict."""
        found, _, sites = self.compiled(enabled=True)
        failed = [site.reason for site in sites if site.verdict == "failed"]
        for site in sites:
            if site.verdict == "fused":
                verdict.sites[site.fusion] = verdict.sites.get(site.fusion, 0) + 1
        problem = self.problem(found)
        if not problem and not failed:
            return
        stock, near, _ = self.compiled(enabled=False)
        theirs = self.problem(stock)
        for ran, true in zip(near, self.true, strict=False):
            self.add_noise(ran.values, true)
        problem = self.problem(found)
        # Inductor pads a product if a timing says so, and then its result has other strides in stock too.
        # Where nothing is fused the graph is stock's, whatever the timing said in stock's own compile.
        padded = bool(problem) and _kind(problem) == "strides" and not verdict.sites
        if padded or (problem and theirs and _kind(problem) == _kind(theirs)):
            verdict.stock_wrong = theirs or problem
        elif problem:
            verdict.problem = f"{problem}; stock: {theirs or 'right'}"
        elif failed:
            verdict.problem = f"a site failed: {failed[0]}"

    def compiled(self, enabled: bool) -> tuple[list[_Ran] | str, list[_Ran], list[reporting.Site]]:
        """Runs of the compiled program with incoming gradients of several layouts, or what it raised; of
        stock also on inputs nearby, which say what rounding does to it; sites."""
        fn, dynamic = self.program.fn, self.program.dynamic
        near: list[_Ran] = []
        with (
            _inductor.fresh_compile(),
            inductor_config.patch(force_shape_pad=self.padded),
            config.patch(policy="always", enabled=enabled),
            reporting.isolated() as sites,
        ):
            try:
                call = torch.compile(fn, dynamic=dynamic)
                ran = [self.run(call, layout=layout) for layout in (LAYOUTS if self.train else (0,))]
                if not enabled and not self.draws:
                    near = [self.run(call, sample) for sample in range(SAMPLES)]
                if device_of(self.program) != "cpu":
                    torch.cuda.synchronize()
            except Exception as error:
                if is_fatal(error):
                    raise
                if device_of(self.program) != "cpu":
                    torch.cuda.synchronize()  # raises what a launch before the error has done to the device
                return f"{type(error).__name__}: {str(error).strip()[:400]}", [], list(sites)
        return ran, near, list(sites)

    def problem(self, found: list[_Ran] | str) -> str:
        """What is wrong with runs, or ""."""
        if isinstance(found, str):
            return f"raises {found}"
        for number, ran in enumerate(found):
            wrong = self.wrong(ran)
            if wrong:
                return wrong + (f" (incoming gradients laid out otherwise, {number})" if number else "")
        return ""

    def wrong(self, ran: _Ran) -> str:
        """What is wrong with one run, or ""."""
        if ran.values.keys() != self.eager.keys():
            return "values: not the tensors of eager mode"
        norms = {name: _norm(z) for name, z in self.exact.items() if not name.startswith("input")}
        largest = max((n for name, n in norms.items() if name.startswith("gradient")), default=0.0)
        # One that vanishes in exact arithmetic, such as that of a key's bias, is rounding in every run, as
        # large as that of the others; it may be the only one.
        whole = max(norms.values(), default=0.0)
        worst = max((self.noise[name] / n for name, n in norms.items() if n > VANISHING * whole), default=0.0)
        for name, y in ran.values.items():
            x, z = self.eager[name], self.exact.get(name)
            if y is None or x is None or z is None:
                if _distance(y, z) > 0:
                    return f"values: {name} is {'there' if y is not None else 'missing'}"
                continue
            if y.dtype != x.dtype or y.shape != x.shape:
                return f"dtype or shape: {name} is {y.dtype} {tuple(y.shape)}, not {x.dtype} {tuple(x.shape)}"
            # What stock pads and hands out has other strides, which must not hide that values are wrong.
            if not self.padded and name in self.strides and ran.strides[name] != self.strides[name]:
                return f"strides: {name} has {ran.strides[name]}, not {self.strides[name]}"
            if name.startswith("input") and _same({"": self.before[name]}, {"": x}):
                if not _same({"": x}, {"": y}):
                    return f"values: {name} was changed"
                continue
            if not y.is_floating_point():
                if not self.draws and not torch.equal(y, x):
                    return f"values: {name} is not that of eager mode"
                continue
            seen = x.isfinite() & z.isfinite()
            if bool((seen & ~y.isfinite()).any()):
                return f"values: {name} is not finite"
            if self.draws:
                continue
            y, z = (torch.where(seen, t.double(), 0.0) for t in (y, z))
            scale = max(_norm(z), largest) if name.startswith("gradient") else _norm(z)
            slack = SLACK.get(x.dtype, SLACK_OF_HALF) * torch.finfo(x.dtype).eps * scale
            noise = self.noise[name]
            if name.startswith("gradient") and _norm(z) <= VANISHING * whole:
                noise = max(noise, worst * whole)
                # Terms that cancel are products of tensors as large as that: dO * v and dO * O, times k.
                slack = max(slack, SLACK_OF_CANCELLED * torch.finfo(x.dtype).eps * whole)
            error = float((y - z).norm())
            if not error <= FACTOR * noise + slack:
                budget = FACTOR * noise + slack
                return f"values: {name} is off by {error:.2e} of {scale:.2e}, budget {budget:.2e}"
        return ""


@dataclass
class _Ran:
    """Results of one run: tensors and, of those that are outputs, strides."""

    values: Run
    strides: dict[str, tuple[int, ...]]
    cotangents: list[torch.Tensor]


def execute(
    call: Callable[..., Any],
    program: Program,
    train: bool,
    cotangents: Sequence[torch.Tensor] | None = None,
    sample: int = 0,
    seed: int = SEED,
    layout: int = 0,
) -> _Ran:
    """Run once on copies of the arguments.

    Args:
        call: what is run: the function, or the function compiled.
        cotangents: of the outputs that require a gradient; random ones, the same at each call, if None.
        sample: which inputs near the program's own.
        seed: of random numbers that are drawn.
        layout: of the incoming gradients, one of `LAYOUTS`.

    Returns:
        Outputs, gradients, and the arguments as the call left them.
    """
    args, kwargs = copied(near((program.args, program.kwargs), sample), train)
    torch.manual_seed(seed)
    with torch.set_grad_enabled(train):
        differentiated = leaves(program.fn, args, kwargs) if train else {}
        outputs = [t for t in pytree.tree_leaves(call(*args, **kwargs)) if isinstance(t, torch.Tensor)]
    strides = {f"output {i}": strides_of(t) for i, t in enumerate(outputs)}
    values: Run = {f"output {i}": t.detach().clone() for i, t in enumerate(outputs)}
    used: list[torch.Tensor] = []
    wanted = [t for t in outputs if t.requires_grad and t.is_floating_point()] if train else []
    if wanted and differentiated:
        used = list(cotangents or [cotangent(i, t) for i, t in enumerate(wanted)])
        given = [laid_out(c.to(t.dtype), layout) for c, t in zip(used, wanted, strict=True)]
        grads = torch.autograd.grad(wanted, list(differentiated.values()), given, allow_unused=True)
        values |= {f"gradient of {n}": g for n, g in zip(differentiated, grads, strict=True)}
    values |= _tensors((args, kwargs))
    return _Ran(values, strides, used)


def mixed_in(program: Program, train: bool, layout: int) -> None:
    """An eager call, forward and backward; whatever it raises is no matter here, but for a dead device.

    Raises:
        RuntimeError: the device is lost, and no compiled code ran since it was last asked.
    """
    try:
        execute(program.fn, program, train, layout=layout)
        if device_of(program) != "cpu":
            torch.cuda.synchronize()
    except Exception as error:
        if is_fatal(error):
            raise RuntimeError(f"an eager call of {program.fn}: {error}") from error


def broken() -> bool:
    """Whether nothing runs in this process any more: torch 2.11 leaves its dispatcher in a state of tracing
    where the compile of a function with `torch.inference_mode()` inside fails."""
    try:
        torch.zeros(1, device="cpu").add(1)
    except RuntimeError:
        return True
    return False


def _tensors(tree: Any) -> Run:
    found = [t for t in pytree.tree_leaves(tree) if isinstance(t, torch.Tensor)]
    return {f"input {i}": t.detach() for i, t in enumerate(found)}


def cotangent(index: int, tensor: torch.Tensor) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 + index)
    values = torch.randn(tensor.shape, dtype=torch.float64, generator=generator, device="cpu")
    made = torch.empty_like(tensor.detach(), dtype=torch.float64)
    return made.copy_(values)


def laid_out(x: torch.Tensor, layout: int) -> torch.Tensor:
    """The same values with other strides."""
    if layout == 0 or x.dim() < 2:
        return x
    dims = (0, 1) if layout == 1 else (-2, -3) if x.dim() > 2 else (-1, -2)
    return x.transpose(*dims).contiguous().transpose(*dims)


def strides_of(t: torch.Tensor) -> tuple[int, ...]:
    """Of the dims that have more than one place; the others' are no matter."""
    if t.layout != torch.strided or t.numel() == 0:
        return ()
    return tuple(s if n > 1 else 0 for s, n in zip(t.stride(), t.shape, strict=True))


def _same(a: Run, b: Run) -> bool:
    def one(x: torch.Tensor | None, y: torch.Tensor | None) -> bool:
        if x is None or y is None:
            return x is y
        return x.shape == y.shape and bool(((x == y) | ((x != x) & (y != y))).all())

    return a.keys() == b.keys() and all(one(a[name], b[name]) for name in a)


def _distance(x: torch.Tensor | None, z: torch.Tensor | None) -> float:
    """The norm of a difference where both are finite; a gradient that is not there is zero."""
    if x is None or z is None:
        known = z if x is None else x
        return 0.0 if known is None else _norm(known)
    x, z = x.detach().double(), z.detach().double()
    return float(torch.where(x.isfinite() & z.isfinite(), x - z, 0.0).norm())


def _norm(x: torch.Tensor | None) -> float:
    return 0.0 if x is None else float(torch.where(x.isfinite(), x, 0).double().norm())


def _kind(problem: str) -> str:
    """Whether two problems are of the same kind."""
    return problem.partition(":")[0]
