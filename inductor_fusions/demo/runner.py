"""One model, compiled stock and fused: compared, and timed in turns."""

from __future__ import annotations

import functools
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from .. import _inductor, config, reporting
from ..checking import budget
from ..worker.clock import Timing, interleave, synchronize
from .models import Case, build, make_inputs
from .reference import gradients_of, reference_tokens, run_reference, shown

#: Blocks of each that are timed.
FEWEST_ROUNDS, MOST_ROUNDS = 5, 25
#: Seconds of a block of short steps.
BLOCK = 0.02

# Dynamo shares compiled code between equal backends, and backends are equal if their options are. So
# stock's differ: they empty the hooks that the fusions are installed in, beside the toggle.
_STOCK_OPTIONS: dict[str, Any] = dict.fromkeys(_inductor.HOOKS.values())


@dataclass
class Row:
    """The result of one model; the fields of the JSON report.

    Attributes:
        sites: attentions in the model, by its configuration.
        fused: of those, the fused ones, by `inductor_fusions.report()`.
        left: of those, the ones that no fused kernel is measured to be faster for on this device.
        errors, stock_errors: relative errors against float64: "output", and in training "gradient",
            the worst parameter's.
        verdict: "ok" and what was left to stock, or what is wrong.
        missed: why the others were not fused: reason -> number of sites.
    """

    model: str
    layers: int
    batch: int
    seq: int
    train: bool
    sites: int
    fused: int = 0
    left: int = 0
    stock_ms: float = 0.0
    fused_ms: float = 0.0
    ratio: float = 0.0
    errors: dict[str, float] = field(default_factory=dict)
    stock_errors: dict[str, float] = field(default_factory=dict)
    stock_compile_s: float = 0.0
    fused_compile_s: float = 0.0
    kernels: list[str] = field(default_factory=list)
    missed: dict[str, int] = field(default_factory=dict)
    verdict: str = "ok"

    @property
    def ok(self) -> bool:
        """Whether every site that should fuse did, and the errors are within their budget."""
        return self.verdict.partition(",")[0] == "ok"


#: Phases of a case, as the progress bar counts them.
PHASES = ("building", "compiling stock", "compiling fused", "running in float64", "timing")


class Runner:
    """Measures one case.

    Args:
        say: called with the name of each phase as it begins.
    """

    def __init__(
        self, case: Case, device: torch.device, dtype: torch.dtype, seconds: float, say: Callable[[str], None]
    ) -> None:
        self.case, self.device, self.dtype, self.seconds, self.say = case, device, dtype, seconds, say
        say(PHASES[0])
        self.model = build(case, device, dtype)
        found: Any = self.model.config
        self.config = found
        self.inputs = self._inputs(0)
        self.cotangent = self._cotangent() if case.train else None
        layers = self.config.num_hidden_layers
        self.row = Row(case.title, layers, case.batch, case.seq, case.train, case.sites(self.config))

    def run(self) -> Row:
        """Compile both, compare and time them."""
        row = self.row
        stock: Any = torch.compile(self.model, dynamic=False, options=_STOCK_OPTIONS)
        fused: Any = torch.compile(self.model, dynamic=False)
        with _inductor.fresh_compile():
            errors = self._judged(stock, fused)
            row.errors, row.stock_errors = shown(errors, "ours"), shown(errors, "stock")
            self.say(PHASES[4])
            times = self._interleaved({"stock": stock, "fused": fused})
            row.stock_ms, row.fused_ms = (1e3 * times[name].median for name in ("stock", "fused"))
            row.ratio = row.stock_ms / row.fused_ms
        if row.fused + row.left < row.sites:
            row.verdict = f"{row.sites - row.fused - row.left} not fused"
        elif budget.problems(errors):
            row.verdict = "error over budget"
        elif row.left:
            row.verdict = f"ok, {row.left} left to stock"
        return row

    def _judged(self, stock: Callable[..., Any], fused: Callable[..., Any]) -> list[budget.Error]:
        """Errors of the fused model. The first run of each compiles it."""
        row = self.row

        def unfused(sample: int) -> budget.Values:
            self._begin(sample, 1)
            with config.patch(enabled=False):
                seconds, found = self._once(stock)
            row.stock_compile_s = row.stock_compile_s or seconds
            return found

        def ours(sample: int) -> budget.Values:
            self._begin(sample, 2)
            seconds, found = self._once(fused)
            row.fused_compile_s = row.fused_compile_s or seconds
            if sample == 0:
                self._count_sites()
            return found

        def true(sample: int) -> budget.Values:
            self._begin(sample, 3)
            return run_reference(self.case, self.model, self.inputs, self.cotangent)

        reporting.clear()
        errors = budget.judge(ours, unfused, true)
        self.inputs = self._inputs(0)
        return errors

    def _begin(self, sample: int, phase: int) -> None:
        """Tell the phase, and take the inputs of a sample."""
        self.say(PHASES[phase if sample == 0 else 3])
        self.inputs = self._inputs(sample)

    def _inputs(self, sample: int) -> dict[str, Any]:
        return make_inputs(self.case, self.config.vocab_size, self.device, sample)

    def _interleaved(self, compiled: dict[str, Any]) -> dict[str, Timing]:
        """Times of a step of each, in as many rounds as there is time for."""
        calls = {name: functools.partial(self.step, call) for name, call in compiled.items()}
        start = time.perf_counter()
        for call in calls.values():
            call()
        synchronize(self.device.type)
        # A block is one step, or several short ones.
        seconds = max(time.perf_counter() - start, BLOCK * len(calls))
        rounds = max(FEWEST_ROUNDS, min(MOST_ROUNDS, int(self.seconds / seconds)))
        return interleave(calls, self.device.type, rounds, BLOCK, max_calls=10)

    def step(self, compiled: Callable[..., Any]) -> torch.Tensor:
        """One inference, or one training step without an optimizer; the last hidden state."""
        if self.case.train:
            self.model.zero_grad(set_to_none=True)
        with torch.set_grad_enabled(self.case.train):
            output: torch.Tensor = compiled(**self.inputs).last_hidden_state
        if self.case.train:
            output.backward(self.cotangent)
        return output.detach()

    def _once(self, compiled: Callable[..., Any]) -> tuple[float, budget.Values]:
        """Run one step, which compiles if it is the first one: seconds, and what the float64 run has of
        output and gradients."""
        start = time.perf_counter()
        output = self.step(compiled)[:1, : reference_tokens(self.case)]
        gradients = gradients_of(self.model)
        synchronize(self.device.type)
        self.model.zero_grad(set_to_none=True)
        return time.perf_counter() - start, budget.Values(output, gradients)

    def _cotangent(self) -> torch.Tensor:
        """A random gradient of the output, zero beyond the slice that the float64 run takes."""
        shape = (self.case.batch, self.case.seq, self.config.hidden_size)
        generator = torch.Generator(self.device).manual_seed(2)
        values = torch.randn(shape, generator=generator, device=self.device, dtype=self.dtype)
        values[1:] = 0
        values[:, reference_tokens(self.case) :] = 0
        return values

    def _count_sites(self) -> None:
        found = [site for site in reporting.report() if site.fusion == "attention"]
        fused = [site for site in found if site.verdict == "fused"]
        # The hint says that it is the policy, and so a measurement, that keeps a site from being fused.
        left = [s for s in found if s.verdict == "left to stock" and "INDUCTOR_FUSIONS_POLICY" in s.hint]
        self.row.fused, self.row.left = len(fused), len(left)
        self.row.kernels = sorted({site.kernel for site in fused})
        self.row.missed = dict(Counter(site.reason for site in found if site.verdict != "fused"))
