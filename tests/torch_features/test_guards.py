"""Dynamo's guards: the package adds none, and what is fused stays right where torch leaves them out."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("peft")

from transformers.generation import CompileConfig

import inductor_fusions
from bench import guards
from inductor_fusions import config

LAYERS = 1


@pytest.mark.parametrize("adapters", [False, True])
def test_the_package_adds_none(adapters: bool) -> None:
    """Of a model that it fuses, with every fusion that is proved."""
    model = guards.llama(adapters, LAYERS)
    inputs = {"input_ids": torch.randint(3, 128, (1, 7)), "use_cache": False}
    with config.patch(policy="always"):
        stock, fused = (guards.guard_count(model, inputs, enabled) for enabled in (False, True))
    assert stock == fused > 100


@pytest.mark.slow
@pytest.mark.parametrize("name", guards.FILTERS[1:])
def test_fused_where_guards_are_left_out(name: str) -> None:
    """Tensors are guarded still: another length is right as well."""
    model = guards.llama(True, LAYERS)
    inductor_fusions.clear()
    with config.patch(policy="always"), torch.no_grad():
        compiled = torch.compile(model, options={"guard_filter_fn": getattr(torch.compiler, name)})
        for length in (5, 9):
            ids = torch.randint(3, 128, (2, length))
            found, wanted = (call(input_ids=ids, use_cache=False).logits for call in (compiled, model))
            torch.testing.assert_close(found, wanted)
    assert inductor_fusions.report().count("fused", "attention")


@pytest.mark.slow
def test_generate() -> None:
    """As docs/lora.md sets it: torch takes no mode beside options."""
    model = guards.llama(True, LAYERS)
    ids = torch.randint(3, 128, (1, 5))
    wanted, found = (_generated(model, ids, compiled) for compiled in (False, True))
    assert torch.equal(found, wanted) and inductor_fusions.report().sites


def _generated(model: torch.nn.Module, ids: torch.Tensor, compiled: bool) -> torch.Tensor:
    keep = torch.compiler.skip_guard_on_all_nn_modules_unsafe
    options = {"guard_filter_fn": keep, "triton.cudagraphs": True}
    setting = CompileConfig(mode=None, options=options)
    setting._compile_all_devices = True  # also without a GPU
    model.generation_config.compile_config = setting
    inductor_fusions.clear()
    found: torch.Tensor = model.generate(
        input_ids=ids, max_new_tokens=6, do_sample=False, cache_implementation="static",
        disable_compile=not compiled,
    )  # fmt: skip
    return found


@pytest.mark.slow
def test_rows() -> None:
    """A filter keeps fewer guards, and a call takes less for them."""
    rows = [guards.measure(True, name, rounds=5, layers=4) for name in guards.FILTERS]
    kept = [row["kept"] for row in rows]
    assert kept == sorted(kept, reverse=True) and kept[0] > 50 * kept[-1]
    assert rows[0]["guarded_us"] > rows[-1]["guarded_us"]
