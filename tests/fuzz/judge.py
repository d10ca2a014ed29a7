"""What must hold of a random program."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from hypothesis import assume, reject

from inductor_fusions import config, testing
from inductor_fusions.block_mm import op
from inductor_fusions.checking.runs import Float64Mode, cast, copied, near, run
from inductor_fusions.sites import Site
from tests.attention.support import flex_everywhere
from tests.fuzz.programs import Program
from tests.support.on_a_gpu import on_a_gpu
from tests.support.padding import padded

#: Of float32's eps, on top of 1.5 times the error of the unfused program: sums of terms that cancel, and
#: backwards that compute the weights anew.
SLACK = 64.0
#: Runs of the unfused program, on inputs that differ a little, that say how large an error of rounding is.
SAMPLES = 6
#: Of the random numbers that a program draws.
SEED = 3
#: The same where a step of float8 may be all that differs: a value beside a boundary falls to either side.
QUANTISED_SAMPLES = 64


@dataclass(frozen=True)
class Judged:
    """A program that was judged right.

    Attributes:
        sites: what the fusions made of it.
        code: whether Inductor's code for the CPU ran, not the graphs alone.
        stock_wrong: what is wrong, where it is so without the fusions as well.
    """

    sites: Sequence[Site]
    code: bool = False
    stock_wrong: str = ""

    @property
    def fused(self) -> list[str]:
        """The fusion of each fused site."""
        return [site.fusion for site in self.sites if site.verdict == "fused"]


def runs(program: Program) -> list[torch.Tensor] | None:
    """The inputs, if the program runs eagerly and gives numbers, forward and backward."""
    try:
        leaves = program.tensors()
        outputs = program.function()(*(x.clone() for x in leaves))
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        if any(x.requires_grad for x in leaves):
            sum(x.double().sum() for x in outputs).backward()
    except (RuntimeError, IndexError):
        return None
    values = [*outputs, *(x.grad for x in leaves if x.grad is not None)]
    return program.tensors() if all(bool(x.isfinite().all()) for x in values) else None


def judge(program: Program, code: bool = False) -> Judged:
    """The program compiled with the fusions is about as exact as without: outputs and gradients.

    Args:
        program: an attention, or nearly one.
        code: judge the code that Inductor makes of it for the device, not the graphs alone.

    Raises:
        AssertionError: it is not, or a fusion raised.
    """
    inputs = runs(program)
    assume(inputs is not None)
    assert inputs is not None
    function = program.function()
    if code:

        def right(ours: testing.Capture) -> bool:
            found = [*ours.tensors, *ours.grads.values()]
            return is_rounding(function, inputs, found, len(ours.tensors), ours.cotangents, SLACK)

        return _judge_code(program, function, inputs, right, train=True)
    with flex_everywhere(program.kernel):
        try:
            seen = testing.check(
                function, inputs, fused=None, slack=SLACK, backend=testing.EAGER_AFTER_PASSES
            )
            return Judged(seen.sites)
        except AssertionError:
            ours = testing.capture(function, *inputs, train=True, backend=testing.EAGER_AFTER_PASSES)
            failed = [site for site in ours.sites if site.verdict == "failed"]
            found = [*ours.tensors, *ours.grads.values()]
            if failed or not is_rounding(function, inputs, found, len(ours.tensors), ours.cotangents, SLACK):
                raise
            return Judged(ours.sites)


def _judge_code(
    program: Program,
    function: Callable[..., Any],
    inputs: Sequence[torch.Tensor],
    right: Callable[[testing.Capture], bool],
    train: bool,
) -> Judged:
    """What Inductor's code computes is right; or wrong in the same way without the fusions.

    Raises:
        AssertionError: it is wrong with the fusions alone, or one raised.
    """

    def compiled(enabled: bool) -> tuple[Sequence[Site], str]:
        with config.patch(attention_kernel=program.kernel, enabled=enabled):
            torch.manual_seed(SEED)
            try:
                found = testing.capture(function, *inputs, train=train)
            except Exception as error:
                return (), f"{type(error).__name__}: {error}"
        return found.sites, "" if right(found) else "wrong values"

    sites, wrong = compiled(True)
    failed = [site for site in sites if site.verdict == "failed"]
    assert not failed, failed
    if wrong:
        _, without = compiled(False)
        assert without.partition(":")[0] == wrong.partition(":")[0], f"{wrong}, stock: {without}, {sites}"
    return Judged(sites, True, wrong)


def judge_products(program: Program, code: bool = False) -> Judged:
    """The program with the fusions of linears, on what seems to be a GPU, is about as exact as in eager mode,
    or as its graphs are without them.

    Args:
        program: linears, or what is nearly that.
        code: judge the code that Inductor makes of it for the device, which is a GPU, not the graphs alone.

    Raises:
        AssertionError: it is not, or a fusion raised.
    """
    inputs = runs(program)
    assume(inputs is not None)
    assert inputs is not None
    function, quantised = program.function(), program.source.count("torch.float8")
    if not code:
        return Judged(check_products(function, inputs, quantised, program.draws, program.pads))
    train = any(x.requires_grad for x in inputs)

    def unfused(*values: torch.Tensor) -> list[torch.Tensor | None]:
        torch.manual_seed(SEED)
        with config.patch(enabled=False):
            stock = testing.capture(function, *values, train=train)
        return [*stock.tensors, *stock.grads.values()]

    def right(ours: testing.Capture) -> bool:
        found = [*ours.tensors, *ours.grads.values()]
        if program.draws:
            return is_same_draw(inputs, found, len(ours.tensors), unfused)
        near = functools.partial(
            is_rounding,
            function,
            inputs,
            found,
            len(ours.tensors),
            ours.cotangents,
            2.0,
            slack_of_float32=SLACK,
        )
        return _by_any(near, quantised, unfused)

    return _judge_code(program, function, inputs, right, train)


def _by_any(near: Callable[..., bool], quantised: int, unfused: Callable[..., Any]) -> bool:
    """Whether rounding explains results: that of eager mode, of a step of float8, or of what is unfused."""
    return near() or bool(quantised and near(samples=QUANTISED_SAMPLES)) or near(graphs=unfused)


def check_products(
    function: Callable[..., Any],
    inputs: Sequence[torch.Tensor],
    quantised: int = 0,
    draws: bool = False,
    pads: int | None = None,
) -> Sequence[Site]:
    """`judge_products` of any function: in training, or in inference where no input requires a gradient.

    Args:
        inputs: those that it overwrites stay as they are.
        quantised: how many casts to float8 it has, all of which are left in the graph.
        draws: whether it draws random numbers: the graphs without the fusions say what is right.
        pads: which products Inductor pads, as `tests.support.padding` has it.
    """
    from tests.block_mm import support

    train = any(x.requires_grad for x in inputs)
    composite = mock.patch.object(op, "composite", functools.partial(as_kernels, op.composite))
    with on_a_gpu(), composite, padded(pads):
        torch.manual_seed(SEED)
        fused = support.run(function, copied(tuple(inputs), train), train=train)
    found = [*fused.outputs, *fused.grads]
    cotangents = support.cotangents(fused.outputs)
    outputs = len(fused.outputs)
    near = functools.partial(is_rounding, function, inputs, found, outputs, cotangents, 2.0)

    def graphs(*values: torch.Tensor) -> list[torch.Tensor | None]:
        torch.manual_seed(SEED)
        with config.patch(enabled=False):
            unfused = support.run(function, copied(values, train), train=train)
        return [*unfused.outputs, *unfused.grads]

    right = is_same_draw(inputs, found, outputs, graphs) if draws else _by_any(near, quantised, graphs)
    assert right, f"wrong: {fused.sites}"
    casts = [node for node in fused.graphs[0].nodes if "convert_element_type" in str(node.target)]
    left = sum(node.meta["val"].is_floating_point() and node.meta["val"].itemsize == 1 for node in casts)
    assert left >= quantised, f"{left} of {quantised} casts to float8 are left: {fused.sites}"
    return fused.sites


def as_kernels(composite: Callable[[op.Call], list[torch.Tensor]], call: op.Call) -> list[torch.Tensor]:
    """What `block_mm` computes on a GPU, which rounds results alone: operations of torch round products."""
    single = {
        name: [x if x.dtype == torch.float64 else x.float() for x in getattr(call, name)]
        for name in ("a", "b", "bias")
    }
    dtype = torch.promote_types(call.dtype, torch.float32)
    made = composite(dataclasses.replace(call, **single, dtype=dtype, wide=""))
    return [y.to(kind) for y, kind in zip(made, call.dtypes, strict=True)]


def is_rounding(
    function: Any,
    inputs: Sequence[torch.Tensor],
    found: Sequence[torch.Tensor | None],
    outputs: int,
    cotangents: Sequence[torch.Tensor],
    slack: float,
    samples: int = SAMPLES,
    graphs: Callable[..., Sequence[torch.Tensor | None]] | None = None,
    slack_of_float32: float | None = None,
) -> bool:
    """Whether results differ from float64 by no more than rounding explains.

    One run may be exact by luck: what rounding does is the largest error of several, on inputs that differ
    by a thousandth. And the gradients of a kernel are exact to some eps of the largest one: a small one is
    what is left where large numbers cancel. Graphs that run node by node round activations more often than
    eager mode does.

    Args:
        function, inputs: what was run.
        found: its results with the fusions: so many outputs, then gradients.
        slack: eps of the dtype that are always allowed.
        samples: how many runs say what rounding does.
        graphs: the results on some inputs of the unfused graphs, whose error counts as well.
        slack_of_float32: `slack` of it, if it is another one: kernels that multiply it in parts.
    """

    def flat(call: Any, values: Sequence[torch.Tensor], given: Sequence[torch.Tensor]) -> list[Any]:
        result, grads, _ = run(call, call, values, {}, True, given)
        results = list(result) if isinstance(result, tuple) else [result]
        return [*results, *grads.values()]

    noise = [0.0] * len(found)
    exact: list[Any] = []
    for sample in range(samples):
        given = near(list(inputs), sample)
        (wide,), _ = cast(((given,), {}), torch.float64)
        with Float64Mode():
            true = flat(function, wide, [c.double() for c in cotangents])
        exact = exact or true
        stock = flat(function, given, cotangents)
        for results in (stock, graphs(*given)) if graphs is not None else (stock,):
            for i, (x, z) in enumerate(zip(results, true, strict=True)):
                noise[i] = max(noise[i], _distance(x, z))
    largest = max((float(z.norm()) for z in exact[outputs:] if z is not None), default=0.0)
    for i, (y, z) in enumerate(zip(found, exact, strict=True)):
        if y is None or z is None:
            if _distance(y, z) > 0:
                return False
            continue
        if y.shape != z.shape:
            return False
        scale = max(float(z.norm()), largest) if i >= outputs else float(z.norm())
        of_float32 = slack_of_float32 is not None and y.dtype == torch.float32
        allowed = slack_of_float32 if of_float32 else slack
        if not _distance(y, z) <= 2 * noise[i] + allowed * torch.finfo(y.dtype).eps * scale:
            return False
    return True


def is_same_draw(
    inputs: Sequence[torch.Tensor],
    found: Sequence[torch.Tensor | None],
    outputs: int,
    unfused: Callable[..., Sequence[torch.Tensor | None]],
) -> bool:
    """Whether results are those of the unfused program with the same random numbers, but for rounding.

    Rounding changes a result by a few hundredths at most, another mask by as much as the result itself.

    Args:
        found: its results with the fusions: so many outputs, then gradients.
        unfused: gives those without the fusions, of a seed.
    """
    wanted = unfused(*inputs)
    noise = [0.0] * len(found)
    for sample in range(1, SAMPLES):
        for i, (x, z) in enumerate(zip(unfused(*near(list(inputs), sample)), wanted, strict=True)):
            noise[i] = max(noise[i], _distance(x, z))
    norms = [0.0 if z is None else float(z.detach().double().norm()) for z in wanted]
    for i, (y, z) in enumerate(zip(found, wanted, strict=True)):
        if y is not None and z is not None and y.shape != z.shape:
            return False
        scale = max(norms[outputs:]) if i >= outputs else norms[i]
        eps = torch.finfo(torch.bfloat16 if y is None else y.dtype).eps
        slack = SLACK if eps < 1e-6 else 2.0
        if not _distance(y, z) <= 2 * noise[i] + slack * eps * scale:
            return False
    return True


def _distance(x: torch.Tensor | None, z: torch.Tensor | None) -> float:
    """The norm of a difference; a gradient that is not there is zero."""
    if x is None or z is None:
        known = z if x is None else x
        return 0.0 if known is None else float(known.double().norm())
    return float((x.detach().double() - z.detach()).norm())


def judge_mask(program: Program, mask: Program, code: bool = False) -> Judged:
    """A mask is dropped only where evaluating it, for all samples, queries and keys, agrees; and rows that
    see a key have their value.

    Args:
        program: calls attention with a mask.
        code: judge the values of the code that Inductor makes of it for the device, not of the graphs.

    Raises:
        AssertionError: it was dropped and is not what was said of it, or values differ.
    """
    inputs = program.tensors()
    try:
        with torch.no_grad():
            seen = mask.function()(*inputs)
            expected = program.function()(*inputs)
    except (RuntimeError, IndexError):  # eager refuses a mask without dims, say
        reject()
    batch, heads, q, k = *expected.shape[:-1], inputs[1].shape[2]
    seen = torch.broadcast_to(seen, (batch, heads, q, k))
    visible = seen.any(-1)
    if code:

        def right(ours: testing.Capture) -> bool:
            (found,) = ours.tensors
            return torch.allclose(found[visible], expected[visible], rtol=1e-4, atol=1e-5)

        return _judge_code(program, program.function(), inputs, right, train=False)
    with flex_everywhere(program.kernel):
        run = testing.capture(program.function(), *inputs, backend=testing.EAGER_AFTER_PASSES)
    failed = [site for site in run.sites if site.verdict == "failed"]
    assert not failed, failed
    for call in run.calls("scaled_dot_product_attention"):
        if call.kwargs.get("is_causal"):
            assert torch.equal(seen, torch.ones_like(seen).tril()), "taken for causal"
        elif call.kwargs.get("attn_mask") is None and len(call.args) < 4:
            assert bool(seen.all()), "taken for all visible"
    torch.testing.assert_close(run.outputs[visible], expected[visible], rtol=1e-4, atol=1e-5)
    return Judged(run.sites)
