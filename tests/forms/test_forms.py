"""What becomes of attention as people write it: what is fused, what is said of the rest, and the numbers."""

from __future__ import annotations

import pytest

from inductor_fusions.testing import says
from tests.attention.support import check
from tests.forms import FORMS, Form


@pytest.mark.parametrize("form", list(FORMS.values()), ids=list(FORMS))
@pytest.mark.parametrize("train", [False, True], ids=["inference", "training"])
def test_form(form: Form, train: bool) -> None:
    function, inputs = form.build()
    seen = check(function, inputs, fused=form.fused, train=train, slack=8.0)
    left = [site for site in seen.sites if site.verdict != "fused"]
    assert len(left) == len(form.reasons), left
    for site, reason in zip(left, form.reasons, strict=True):
        assert says(site, reason), site
