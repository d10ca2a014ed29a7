"""Nothing but the rewrite of a candidate changes a graph: where no site is fused, it is stock's."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn

from inductor_fusions import config, watching
from tests.support.graphs import Seen, after_autograd, told

BOTH = pytest.mark.parametrize("train", [False, True], ids=["inference", "training"])


def check_is_stock(fn: Any, args: Sequence[Any], kwargs: dict[str, Any], train: bool) -> None:
    """With INDUCTOR_FUSIONS_MAX=0 every graph is as stock has it, before and after autograd."""
    stock, none = after_autograd(fn, args, kwargs, train, enabled=False)
    assert stock and not none
    seen = Seen()
    with watching.by(seen):
        ours, sites = after_autograd(fn, args, kwargs, train, max="0", strict=True, policy="always")
    assert not [site for site in sites if site.verdict == "fused"]
    assert {stage for stage, _ in seen.before} == {"pre_grad", "post_grad"}
    for before, after in zip(seen.before, seen.after, strict=True):
        assert before == after
    assert ours == stock


def check_is_read_alone(fn: Any, args: Sequence[Any], kwargs: dict[str, Any], train: bool) -> list[Any]:
    """Recognisers and guards leave graphs as they are (`strict`), also behind sites that are fused."""
    _, sites = after_autograd(fn, args, kwargs, train, strict=True, policy="always")
    return [site for site in sites if site.verdict == "fused"]


# -- functions -------------------------------------------------------------------------------------------


def in_place(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
    """Scores that are scaled and masked in place, by statements."""
    scores = q @ k.transpose(-2, -1)
    scores.mul_(0.125)
    scores.masked_fill_(hidden, -math.inf)
    return torch.softmax(scores, -1) @ v


def transposed(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
    """What stock's patterns misread: q permuted otherwise than they have it."""
    scores = q.transpose(1, 2).transpose(1, 2) @ k.transpose(-2, -1) / 3.0
    return torch.softmax(scores.masked_fill(hidden, -1e4), -1) @ v + scores.mean()


def sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
    """A causal mask that is written out, and one that may be anything."""
    causal = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril()
    first = nn.functional.scaled_dot_product_attention(q, k, v, causal)
    return nn.functional.scaled_dot_product_attention(first, k, v, ~hidden)


def tensors() -> list[torch.Tensor]:
    q, k, v = (torch.randn(2, 4, 16, 8, requires_grad=True) for _ in range(3))
    hidden = torch.zeros(2, 1, 16, 16, dtype=torch.bool)
    hidden[:, :, :, 12:] = True
    return [q, k, v, hidden]


@BOTH
@pytest.mark.parametrize("fn", [in_place, transposed, sdpa])
def test_functions(fn: Callable[..., torch.Tensor], train: bool) -> None:
    check_is_stock(fn, tensors(), {}, train)
    assert check_is_read_alone(fn, tensors(), {}, train)


def test_flex_attention() -> None:
    """The query of the user's own call is settled, unless no site is wanted."""
    from torch.nn.attention.flex_attention import flex_attention

    def flex(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        q, k, v = ((x @ part).view(2, 16, 4, 16).transpose(1, 2) for part in w)
        return flex_attention(q, k, v)

    args = [torch.randn(2, 16, 64), torch.randn(3, 64, 64)]
    check_is_stock(flex, args, {}, False)
    graphs, _ = after_autograd(flex, args, {}, False, strict=True)
    assert any("as_strided" in str(node) for graph in graphs for node in graph)


# -- models ----------------------------------------------------------------------------------------------


@BOTH
def test_adapters(train: bool) -> None:
    pytest.importorskip("peft")
    from tests.block_mm.support import run
    from tests.lora.test_peft import Adapted, ids

    model, tokens = Adapted("Llama"), ids("Llama")
    check_is_stock(model, [tokens], {}, train)
    with config.patch(enabled=False):
        stock = run(model, [tokens], train=train)
    with config.patch(max="0"):
        none = run(model, [tokens], train=train)
    assert not stock.sites and none.sites and not any(site.verdict == "fused" for site in none.sites)
    assert [told(graph) for graph in none.graphs] == [told(graph) for graph in stock.graphs]


def architectures() -> list[str]:
    survey = pytest.importorskip("tests.models.survey")
    return list(survey.architectures())


def check_architecture(name: str, attention: str, train: bool) -> None:
    from tests.models import survey

    try:
        model, inputs, _ = survey.make(name, attention)
    except RuntimeError as error:
        pytest.skip(str(error)[:200])
    if survey._draws(model, inputs) or not survey._runs_without(model, inputs, train):
        pytest.skip("it draws random numbers, or stock cannot compile it")
    check_is_stock(model, [], inputs, train)
    check_is_read_alone(model, [], inputs, train)


@BOTH
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("name", ["bert", "t5"])
def test_architectures(name: str, attention: str, train: bool) -> None:
    pytest.importorskip("transformers")
    if (attention == "sdpa") == (name == "t5") or (name == "t5" and train):
        pytest.skip("one of each is enough; the others are among all")
    check_architecture(name, attention, train)


def test_some_architecture() -> None:
    """One of all, another one each day."""
    import datetime

    pytest.importorskip("transformers")
    name = random.Random(datetime.date.today().isoformat()).choice(architectures())
    check_architecture(name, "eager", False)
