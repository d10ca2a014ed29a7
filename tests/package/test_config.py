"""Toggles: from the environment, by assignment, by patch; and values that are not understood."""

from __future__ import annotations

import subprocess
from typing import Any

import pytest
import torch

import inductor_fusions
from inductor_fusions import config, testing
from tests.support.processes import ROOT, forked, start

REFUSED = [
    ("INDUCTOR_FUSIONS_ATTENTION", "maybe", "0 or 1"),
    ("INDUCTOR_FUSIONS", "", "0 or 1"),
    ("INDUCTOR_FUSIONS", "2", "0 or 1"),
    ("INDUCTOR_FUSIONS_POLICY", "never", "profitable or always"),
    ("INDUCTOR_FUSIONS_EMPTY_ROWS", "1", "keep or stock or ignore"),
    ("INDUCTOR_FUSIONS_STRICT", "raise", "0 or 1"),
    ("INDUCTOR_FUSIONS_MAX", "-1", "a whole number"),
    ("INDUCTOR_FUSIONS_MAX", "few", "a whole number"),
]
NEAREST = {
    "INDUCTOR_FUSIONS_ATENTION": "INDUCTOR_FUSIONS_ATTENTION",
    "INDUCTOR_FUSIONS_POLICIES": "INDUCTOR_FUSIONS_POLICY",
    "INDUCTOR_FUSIONS_STRIKT": "INDUCTOR_FUSIONS_STRICT",
}


@pytest.fixture(scope="module")
def imported() -> dict[tuple[str, str], subprocess.CompletedProcess[str]]:
    """What an import does with each of these variables."""
    given = [(name, value) for name, value, _ in REFUSED] + [(name, "1") for name in NEAREST]
    code = "import inductor_fusions; print(inductor_fusions.enabled())"
    return dict(zip(given, forked(code, [((), dict([each])) for each in given]), strict=True))


@pytest.mark.parametrize(("name", "value", "takes"), REFUSED)
def test_value_that_is_not_understood(name: str, value: str, takes: str, imported: Any) -> None:
    """One line, with the variable and the values that it takes."""
    done = imported[name, value]
    assert done.returncode != 0
    last = done.stderr.strip().splitlines()[-1]
    assert name in last and takes in last and repr(value) in last


@pytest.mark.parametrize(("name", "nearest"), NEAREST.items())
def test_unknown_variable(name: str, nearest: str, imported: Any) -> None:
    """A warning with the nearest name; everything works."""
    done = imported[name, "1"]
    assert (done.returncode, done.stdout.strip()) == (0, "True")
    assert done.stderr.count("UserWarning") == 1
    assert name in done.stderr and nearest in done.stderr


def test_known_variables() -> None:
    code = (
        "from inductor_fusions import config\n"
        "print(config.enabled, config.attention, config.policy, config.empty_rows, config.strict)"
    )
    assert start("-c", code).stdout.split() == ["True", "True", "profitable", "keep", "False"]
    variables = {
        "INDUCTOR_FUSIONS": "0", "INDUCTOR_FUSIONS_ATTENTION": "False", "INDUCTOR_FUSIONS_POLICY": "always",
        "INDUCTOR_FUSIONS_EMPTY_ROWS": "stock", "INDUCTOR_FUSIONS_STRICT": "on",
    }  # fmt: skip
    done = start("-c", code, **variables)
    assert done.stdout.split() == ["False", "False", "always", "stock", "True"]
    assert "Warning" not in done.stderr


def test_switched_off_by_the_environment() -> None:
    """INDUCTOR_FUSIONS=0: no hook is touched; and it can be switched on later."""
    code = (
        "import inductor_fusions\n"
        "from torch._inductor import config as inductor\n"
        "print(inductor.pre_grad_custom_pass, inductor_fusions.enabled())\n"
        "inductor_fusions.config.enabled = True\n"
        "inductor_fusions.enable()\n"
        "print('FusionPass' in str(inductor.pre_grad_custom_pass), inductor_fusions.enabled())\n"
    )
    assert start("-c", code, INDUCTOR_FUSIONS="0").stdout.split() == ["None", "False", "True", "True"]


def attention(q, k, v):
    return torch.softmax(q @ k.transpose(-2, -1) * 0.3, dim=-1) @ v


def verdicts(**options) -> list[str]:
    inputs = [torch.randn(1, 2, 5, 8) for _ in range(3)]
    run = testing.capture(attention, *inputs, backend=testing.EAGER_AFTER_PASSES, **options)
    return [site.verdict for site in run.sites]


def test_patch() -> None:
    assert verdicts() == ["fused"]
    with config.patch(attention=False):
        assert verdicts() == []
        with config.patch({"attention": True}):
            assert verdicts() == ["fused"]
        assert verdicts() == []
    with config.patch(enabled=False):
        assert verdicts() == []
        assert not inductor_fusions.enabled()
    assert verdicts() == ["fused"]
    assert inductor_fusions.enabled()


def test_patch_as_decorator() -> None:
    @config.patch("attention", False)
    def off() -> list[str]:
        return verdicts()

    assert off() == []
    assert verdicts() == ["fused"]


def test_assignment() -> None:
    config.attention = False
    try:
        assert verdicts() == []
    finally:
        config.attention = True
    assert verdicts() == ["fused"]


def test_policy() -> None:
    assert verdicts(policy="always") == ["fused"]
    assert verdicts(policy="profitable") in (["left to stock"], ["fused"])


def test_unknown_toggle() -> None:
    with pytest.raises(AttributeError):
        config.atention = True
    with pytest.raises((AttributeError, KeyError)), config.patch(atention=False):
        pass


@pytest.mark.parametrize(("entry", "value", "takes"), [
    ("enabled", None, "0 or 1"),
    ("attention", "no", "0 or 1"),
    ("policy", "alway", "profitable or always"),
    ("attention_kernel", None, "auto or sdpa"),
    ("skip", ["attention"], "comma-separated names"),
    ("max", "x", "a whole number"),
    ("max", -1, "a whole number"),
    ("measure_budget", 1.5, "a whole number"),
])  # fmt: skip
def test_assigned_value_that_is_not_understood(entry: str, value: object, takes: str) -> None:
    """The assignment raises, not the compile after it, and nothing changes."""
    before = getattr(config, entry)
    for assign in (lambda: setattr(config, entry, value), lambda: config.patch({entry: value}).__enter__()):
        with pytest.raises(ValueError, match=rf"config\.{entry} must be {takes}") as raised:
            assign()
        assert str(raised.value).endswith(repr(value))
    assert getattr(config, entry) == before


@pytest.mark.parametrize(("entry", "value"), [("attention", 0), ("max", 3), ("max", "0"), ("max", None)])
def test_assigned_value_that_is_understood(entry: str, value: object) -> None:
    with config.patch({entry: value}):
        assert getattr(config, entry) == value


def test_each_toggle_has_its_variable() -> None:
    """Declared under the name of the entry, and told in the table of the documentation."""
    page = (ROOT / "docs" / "configuration.md").read_text()
    for name in config.get_config_copy():
        variable = "INDUCTOR_FUSIONS" if name == "enabled" else f"INDUCTOR_FUSIONS_{name.upper()}"
        takes = ", ".join(config.variables()[variable])
        assert f"| `{name}` | `{variable}` | {takes} |" in page
