"""What must hold of a random program."""

from __future__ import annotations

import torch
from hypothesis import assume, reject

from inductor_fusions import testing
from tests.attention.support import flex_everywhere
from tests.fuzz.programs import Program

#: Of float32's eps, on top of 1.5 times the error of the unfused program: sums of terms that cancel, and
#: backwards that compute the weights anew.
SLACK = 64.0


def runs(program: Program) -> list[torch.Tensor] | None:
    """The inputs, if the program runs eagerly and gives numbers, forward and backward."""
    try:
        leaves = program.tensors()
        outputs = program.function()(*(x.clone() for x in leaves))
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        sum(x.double().sum() for x in outputs).backward()
    except (RuntimeError, IndexError):
        return None
    values = [*outputs, *(x.grad for x in leaves if x.grad is not None)]
    return program.tensors() if all(bool(x.isfinite().all()) for x in values) else None


def judge(program: Program) -> None:
    """The program compiled with the fusions is about as exact as without: outputs and gradients.

    Raises:
        AssertionError: it is not, or a fusion raised.
    """
    inputs = runs(program)
    assume(inputs is not None)
    assert inputs is not None
    with flex_everywhere(program.kernel):
        testing.check(program.function(), inputs, fused=None, slack=SLACK, backend=testing.EAGER_AFTER_PASSES)


def judge_mask(program: Program, mask: Program) -> None:
    """A mask is dropped only where evaluating it, for all samples, queries and keys, agrees; and rows that
    see a key have their value.

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
    with flex_everywhere(program.kernel):
        run = testing.capture(program.function(), *inputs, backend=testing.EAGER_AFTER_PASSES)
    failed = [site for site in run.sites if site.verdict == "failed"]
    assert not failed, failed
    for call in run.calls("scaled_dot_product_attention"):
        if call.kwargs.get("is_causal"):
            assert torch.equal(seen, torch.ones_like(seen).tril()), "taken for causal"
        elif call.kwargs.get("attn_mask") is None and len(call.args) < 4:
            assert bool(seen.all()), "taken for all visible"
    visible = seen.any(-1)
    torch.testing.assert_close(run.outputs[visible], expected[visible], rtol=1e-4, atol=1e-5)
