"""torchao beside the fusions: models that it quantises, and its own pass in our hook. It is no dependency."""

from __future__ import annotations

import copy
import logging
import operator
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch._inductor import config as inductor_config

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    quantisation: Any = pytest.importorskip("torchao.quantization")

import inductor_fusions
from inductor_fusions import config, registration, testing
from tests import blocks

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")

SET = (
    "coordinate_descent_tuning", "coordinate_descent_check_all_directions", "force_fuse_int_mm_with_mul",
    "fx_graph_cache", "triton.unique_kernel_names", "pre_grad_custom_pass",
)  # fmt: skip


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    """What torchao sets in Inductor's config is as before."""
    with inductor_config.patch({name: operator.attrgetter(name)(inductor_config) for name in SET}):
        yield
    inductor_fusions.enable()


@pytest.mark.parametrize("backend", [testing.EAGER_AFTER_PASSES, "inductor"])
@pytest.mark.parametrize("name", ["Int8WeightOnlyConfig", "Int8DynamicActivationInt8WeightConfig"])
def test_quantised_model(name: str, backend: str) -> None:
    """Its attention is fused; the result is that of the quantised model, not of the one before."""
    plain = blocks.model(1).to(torch.bfloat16).eval()
    model = copy.deepcopy(plain)
    quantisation.quantize_(model, getattr(quantisation, name)())
    quantisation.utils.recommended_inductor_config_setter()
    x = blocks.batch().to(torch.bfloat16)
    with torch.no_grad():
        expected, before = model(x).double(), plain(x).double()
    run = testing.capture(model, x, backend=backend)
    assert [site.fusion for site in run.fused] == ["attention"]
    distance = (run.outputs.double() - expected).norm()
    assert distance <= 4 * torch.finfo(torch.bfloat16).eps * expected.norm()
    assert not torch.equal(expected, before)


def test_its_own_pass(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """torchao assigns its pass to our hook: that is said, and `enable` has both of them run."""
    fusing: Any = pytest.importorskip("torchao.prototype.attention.shared_utils.fusion_utils")
    monkeypatch.setattr(registration, "_warned", set())
    ran: list[Any] = []
    monkeypatch.setattr(fusing, "rope_sdpa_fusion_pass", lambda graph, **_: ran.append(graph))
    model, x = blocks.model(1).eval(), blocks.batch()

    def attentions() -> int:
        ran.clear()
        with torch.no_grad(), config.patch(policy="always"):
            run = testing.capture(model, x, backend=testing.EAGER_AFTER_PASSES)
            torch.testing.assert_close(run.outputs, model(x), rtol=1e-4, atol=1e-5)
        assert ran
        return len(run.fused)

    inductor_config.pre_grad_custom_pass = fusing.RopeSDPAFusionPass(rope_sdpa_op=None, fp8_sdpa_op=None)
    with caplog.at_level(logging.WARNING, logger="inductor_fusions"):
        assert attentions() == 0
    assert "pre_grad_custom_pass" in caplog.text
    inductor_fusions.enable()
    assert attentions() == 1
