"""What becomes of adapters, gates and loss heads as people write them, where all that is proved is fused."""

from __future__ import annotations

import pytest
import torch

from inductor_fusions.fusions.lora import factors, merged, norms
from inductor_fusions.testing import says
from tests.block_mm.support import check, run
from tests.forms.adapters import ADAPTERS
from tests.forms.gates import GATES
from tests.forms.linear_form import LinearForm
from tests.forms.losses import LOSSES
from tests.forms.other_adapters import OTHER_ADAPTERS
from tests.forms.probabilities import PROBABILITIES


@pytest.fixture(autouse=True)
def any_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, before autograd as well."""
    for module in (norms, factors, merged):
        monkeypatch.setattr(module, "check_device", lambda value: None)


FORMS: dict[str, LinearForm] = {**ADAPTERS, **OTHER_ADAPTERS, **GATES, **LOSSES, **PROBABILITIES}


@pytest.mark.parametrize("form", list(FORMS.values()), ids=list(FORMS))
@pytest.mark.parametrize("train", [False, True], ids=["inference", "training"])
def test_form(form: LinearForm, train: bool) -> None:
    function, inputs = form.build(train, torch.bfloat16)
    if form.random and train:  # eager mode draws other numbers
        seen = run(function, inputs, train=True)
    else:
        seen = check(function, inputs, train=train, budget=2.0)
    reason = form.reasons[train]
    said = [site for site in seen.sites if site.verdict != "fused"]
    assert seen.products() == form.left[train], said
    if reason:
        assert any(says(site, reason) for site in said), said
