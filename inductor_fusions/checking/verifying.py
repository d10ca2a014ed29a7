"""`verify()`: outputs and gradients of a model, fused and unfused, against float64."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from .. import _inductor, config, reporting
from ..sites import SCHEMA, Site, text
from . import budget
from .budget import Error, Values
from .runs import Outcome, exact, near, own_buffers, run

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["Row", "Verification", "verify"]


@dataclass(frozen=True)
class Row:
    """One compile with some of the fusions.

    Attributes:
        fusions: those that were on.
        sites: the candidates that it met.
        errors: of each output and gradient, with their budgets.
    """

    fusions: tuple[str, ...]
    sites: list[Site]
    errors: list[Error]

    @property
    def fused(self) -> int:
        """Number of fused sites."""
        return sum(site.verdict == "fused" for site in self.sites)

    @property
    def problems(self) -> list[str]:
        """Descriptions of failed sites and of errors over budget."""
        failed = [f"a fusion raised: {site.reason}" for site in self.sites if site.verdict == "failed"]
        return failed + budget.problems(self.errors)

    def worst(self, gradient: bool) -> Error | None:
        """The output, or the gradient, that is nearest to its budget or furthest over it."""
        errors = [error for error in self.errors if error.gradient is gradient]
        return max(
            errors, key=lambda e: (bool(e.problem), e.ours / e.budget if e.budget else 0.0), default=None
        )


@dataclass(frozen=True)
class Verification:
    """The result of `verify`: print it, or check `ok`.

    Attributes:
        title: name of the function or of the module's class.
        rows: one with every fusion; if more than one fused something, also one with each alone.
    """

    title: str
    rows: list[Row] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether all errors are within their budgets and no fusion raised. True if nothing was fused."""
        return not any(row.problems for row in self.rows)

    def to_dict(self) -> dict[str, Any]:
        """Plain data: {"schema": 1, "ok": ..., "rows": [...]}."""
        rows = [
            {
                "fusions": list(row.fusions),
                "fused": row.fused,
                "problems": row.problems,
                "errors": [asdict(error) for error in row.errors],
                "sites": [asdict(site) for site in row.sites],
            }
            for row in self.rows
        ]
        return {"schema": SCHEMA, "ok": self.ok, "title": self.title, "rows": rows}

    def to_json(self) -> str:
        """`to_dict()` as JSON."""
        return json.dumps(self.to_dict(), indent=1)

    def verdict(self) -> str:
        """One line."""
        if not self.ok:
            return f"{self.title}: WRONG, {sum(len(row.problems) for row in self.rows)} problems"
        if not any(row.fused for row in self.rows):
            return f"{self.title}: nothing was fused, so there is nothing to check"
        return f"{self.title}: ok; sites fused: {self.rows[0].fused}"

    def __rich__(self) -> Table:
        from rich.box import SIMPLE_HEAD
        from rich.table import Table

        table = Table(box=SIMPLE_HEAD, pad_edge=False)
        for name in ("fusions on", "sites fused", "worst", "error", "stock's", "budget", "verdict"):
            table.add_column(name, justify="left" if name in ("fusions on", "worst", "verdict") else "right")
        for row in self.rows:
            shown = [error for gradient in (False, True) if (error := row.worst(gradient)) is not None]
            for i, error in enumerate(shown):
                name = f"gradient of {error.name}" if error.gradient else error.name
                numbers = [f"{value:.1e}" for value in (error.ours, error.stock, error.budget)]
                first = (", ".join(row.fusions), str(row.fused)) if i == 0 else ("", "")
                said = "[red]over budget" if error.problem else "[green]ok"
                table.add_row(*first, name, *numbers, said)
        return table

    def __str__(self) -> str:
        problems = [problem for row in self.rows for problem in row.problems]
        return "\n".join([text(self.__rich__()).rstrip(), *problems, self.verdict()])


def verify(
    fn: Callable[..., Any],
    *args: Any,
    train: bool = True,
    policy: str | None = None,
    factor: float = budget.FACTOR,
    slack: float = budget.SLACK,
    dynamic: bool | None = None,
    **kwargs: Any,
) -> Verification:
    """Measure the errors of a model against float64, with and without the fusions.

    The model is compiled without the fusions and with all of them; if more than one fused something, also
    with each alone. The reference is a copy that runs eagerly in float64. The relative error of an output may
    be `factor` times that of the unfused compile plus `slack` eps of its dtype; a gradient may have `slack`
    times four eps of float32 more. An error over budget may be chance: it is judged again, on nearby
    inputs too. The caller's compiled code, caches, counters and buffers do not change.

    Args:
        fn: a function or a module. It must not draw random numbers: with dropout, call `eval()` first, which
            does not disable gradients.
        args: its arguments. Tensors are copied first.
        train: also compare gradients, of the inputs and parameters that require one.
        policy: "always" or "profitable"; None: that of `inductor_fusions.config`.
        factor: allowed multiple of stock's error.
        slack: allowed number of eps in addition.
        dynamic: as in `torch.compile`.
        kwargs: keyword arguments of `fn`.

    Returns:
        Errors, sites and verdict.

    Raises:
        ValueError: `fn` draws random numbers, or the policy is unknown.
    """
    chosen = config.check_policy(config.policy if policy is None else policy)
    fn = getattr(fn, "_torchdynamo_orig_callable", getattr(fn, "_orig_mod", fn))
    title = type(fn).__name__ if isinstance(fn, nn.Module) else getattr(fn, "__name__", repr(fn))
    _refuse_random(fn, args, kwargs)
    judged = _judge(fn, (args, kwargs), train, chosen, dynamic, factor, slack)
    sites, errors = judged(str(config.skip))
    fused = list(dict.fromkeys(site.fusion for site in sites if site.verdict == "fused"))
    rows = [Row(tuple(fused) or ("all",), sites, errors)]
    if len(fused) > 1:
        for name in fused:
            others = ",".join([str(config.skip), *(other for other in fused if other != name)])
            rows.append(Row((name,), *judged(others)))
    return Verification(title, rows)


def _judge(
    fn: Callable[..., Any],
    given: tuple[Any, Any],
    train: bool,
    policy: str,
    dynamic: bool | None,
    factor: float,
    slack: float,
) -> Callable[[str], tuple[list[Site], list[Error]]]:
    """Gives sites and errors with the fusions but those of a list that is skipped.

    All are compared with the same runs of stock and in float64. Arguments as of `verify`; `given` are the
    positional and the keyword ones of the function.
    """

    def compiled(sample: int, cotangents: Sequence[torch.Tensor] | None = None) -> tuple[Outcome, list[Site]]:
        args, kwargs = near(given, sample)
        with (
            _inductor.isolated_compile() as compile,
            reporting.isolated(keep=False) as sites,
            own_buffers(fn),
        ):
            outcome = run(compile(fn, _inductor.inductor(), dynamic), fn, args, kwargs, train, cotangents)
        return outcome, sites

    @functools.cache
    def stock(sample: int) -> Outcome:
        with config.patch(enabled=False):
            return compiled(sample)[0]

    @functools.cache
    def true(sample: int) -> Values:
        args, kwargs = near(given, sample)
        return Values(*exact(fn, args, kwargs, train, stock(sample)[2])[:2])

    def judged(skip: str) -> tuple[list[Site], list[Error]]:
        sites: list[list[Site]] = []

        def ours(sample: int) -> Values:
            with config.patch(enabled=True, policy=policy, skip=skip):
                outcome, found = compiled(sample, stock(sample)[2])
            sites.append(found)
            return Values(*outcome[:2])

        def unfused(sample: int) -> Values:
            return Values(*stock(sample)[:2])

        errors = budget.judge(ours, unfused, true, factor, slack, slack * budget.RECOMPUTED)
        return sites[0], errors

    return judged


def _refuse_random(fn: Callable[..., Any], args: Any, kwargs: Any) -> None:
    before = _random_state()
    with own_buffers(fn), torch.random.fork_rng():
        run(fn, fn, args, kwargs, train=False)
        drawn = not all(map(torch.equal, before, _random_state()))
    if drawn:
        raise ValueError(
            "the model draws random numbers, so its runs cannot be compared: call model.eval() to disable "
            "dropout"
        )


def _random_state() -> list[torch.Tensor]:
    states = [torch.random.get_rng_state()]
    return states + (torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [])
