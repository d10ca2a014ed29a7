"""What becomes of adapters, gates and loss heads as people write them, where all that is proved is fused."""

from __future__ import annotations

import pytest
import torch

from inductor_fusions.testing import says
from tests.block_mm.support import check, run
from tests.forms import LINEAR_FORMS, LinearForm

pytestmark = pytest.mark.usefixtures("any_device")


@pytest.mark.parametrize("form", list(LINEAR_FORMS.values()), ids=list(LINEAR_FORMS))
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
    assert not [site for site in said if site.fusion == form.silent], said
    if reason:
        assert any(says(site, reason) for site in said), said
