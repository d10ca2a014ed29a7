"""What an import does, mostly in processes of their own: versions of torch, the order of imports, threads."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest
import torch

from inductor_fusions import config
from inductor_fusions.fusion import Candidate, Fusion
from tests.support.processes import start

FRESH = """
import warnings, sys, torch
torch.__version__ = {version!r}
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    import inductor_fusions
    inductor_fusions.enable()
    f = lambda x: torch.softmax(x @ x.mT, -1) @ x
    x = torch.randn(1, 2, 4, 8)
    torch.testing.assert_close(torch.compile(f)(x), f(x))
print(len([w for w in caught if "inductor_fusions" in str(w.message)]))
print(*[str(w.message) for w in caught if "inductor_fusions" in str(w.message)])
from torch._inductor import config
print(config.pre_grad_custom_pass)
"""


def fresh(code: str) -> str:
    done = start("-c", code)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_torch_that_is_too_old() -> None:
    """One warning, nothing registered, torch.compile works."""
    count, text, hook = fresh(FRESH.format(version="2.10.1")).splitlines()
    assert (count, hook) == ("1", "None")
    assert "2.10.1 is older than 2.11" in text


def test_torch_that_is_newer_than_tested() -> None:
    """A small attention is tried; one warning, and fusions are on."""
    count, text, hook = fresh(FRESH.format(version="2.99.0")).splitlines()
    assert count == "1" and "2.99.0 is newer than" in text and "fusions are on" in text
    assert "FusionPass" in hook


BROKEN = {
    "a private name is gone": (
        "from inductor_fusions import _inductor\ndel _inductor.trace_id, _inductor.reports.trace_id"
    ),
    "other numbers": (
        "def scaled_dot_product_attention(q, k, v, **_): return v * 2\n"
        "torch._C._nn.scaled_dot_product_attention = scaled_dot_product_attention\n"
    ),
}


@pytest.mark.parametrize("breaking", BROKEN.values(), ids=BROKEN)
def test_newer_torch_that_does_not_work(breaking: str) -> None:
    """One warning, and everything is left as it was, however often one compiles."""
    out = fresh(
        "import warnings\nimport torch\ntorch.__version__ = '2.99.0'\n"
        "import inductor_fusions\nimport torch._inductor.config\n"
        f"{breaking}\n"
        "inductor_fusions.config.policy = 'always'\n"
        "with warnings.catch_warnings(record=True) as caught:\n"
        "    warnings.simplefilter('always')\n"
        "    first = lambda x: torch.softmax(x @ x.mT, -1) @ x\n"
        "    for f in (first, lambda x: first(x) + 1):\n"
        "        x = torch.randn(1, 2, 4, 8)\n"
        "        torch.testing.assert_close(torch.compile(f)(x), f(x))\n"
        "ours = [str(w.message) for w in caught if 'inductor_fusions' in str(w.message)]\n"
        "print(len(ours), len(inductor_fusions.report().sites), *ours)\n"
    )
    assert out.startswith("1 0 ") and "nothing is fused" in out, out


def test_newer_torch_without_what_is_installed_into() -> None:
    """Inductor is imported all the same."""
    out = fresh(
        "import warnings\nimport torch\ntorch.__version__ = '2.99.0'\n"
        "import inductor_fusions\nfrom inductor_fusions import _inductor\n"
        "def gone(*_): raise AttributeError('user_override')\n"
        "_inductor.update_hook = gone\n"
        "with warnings.catch_warnings(record=True) as caught:\n"
        "    warnings.simplefilter('always')\n"
        "    f = lambda x: torch.softmax(x @ x.mT, -1) @ x\n"
        "    x = torch.randn(1, 2, 4, 8)\n"
        "    torch.testing.assert_close(torch.compile(f)(x), f(x))\n"
        "print(*[str(w.message) for w in caught if 'inductor_fusions' in str(w.message)], sep='\\n')\n"
    )
    assert len(out.splitlines()) == 1 and "nothing is fused" in out and "user_override" in out


def test_what_is_tried_is_fused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The small attention of the check is one that is recognised, also while something is traced."""
    from inductor_fusions import registry
    from inductor_fusions.driver import matching, smoke

    seen: list[str] = []
    found = matching.candidates

    def spied(fusion: Fusion, graph: torch.fx.Graph) -> Iterator[Candidate]:
        for candidate in found(fusion, graph):
            rewrite = candidate.rewrite
            monkeypatch.setattr(candidate, "rewrite", lambda rewrite=rewrite: seen.append(rewrite()))
            yield candidate

    monkeypatch.setattr(matching, "candidates", spied)
    with config.patch(policy="always"), torch.device("meta"), torch.autocast("cpu"):
        assert smoke._attempt(registry.of("pre_grad")) == ""
    assert any("causal" in kernel for kernel in seen)


#: What is done between the import of this package and that of Inductor, and what this prints.
BEFORE_INDUCTOR = {
    "nothing": ("print('torch._inductor.config' in sys.modules)", "False"),  # we do not import it
    "the passes": ("from inductor_fusions.driver import passes", ""),  # which import it
    "disabled": (
        "inductor_fusions.disable()\n"
        "from torch._inductor import config\n"
        "print(config.pre_grad_custom_pass, config.post_grad_custom_pre_pass)\n"
        "inductor_fusions.enable()",
        "None None",
    ),
}


@pytest.mark.parametrize(("code", "printed"), BEFORE_INDUCTOR.values(), ids=BEFORE_INDUCTOR)
def test_import_before_inductor(code: str, printed: str) -> None:
    """It is set up as soon as it is imported."""
    out = fresh(
        f"import sys, torch, inductor_fusions\n{code}\n"
        "from torch._inductor import config\n"
        "print('FusionPass' in str(config.pre_grad_custom_pass))\n"
        "print('FusionPass' in str(config.post_grad_custom_pre_pass))\n"
    )
    assert out.split() == [*printed.split(), "True", "True"]


THREADS = """
import threading
import torch, inductor_fusions
from torch._inductor import config

def run(function):
    threads = [threading.Thread(target=function) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print(str(config.pre_grad_custom_pass).count("FusionPass"), inductor_fusions.enabled())

run(inductor_fusions.disable)
run(inductor_fusions.enable)
run(inductor_fusions.enable)
inductor_fusions.disable()
run(lambda: None)
"""


def test_threads_that_enable() -> None:
    """In any thread, for all threads."""
    assert fresh(THREADS).splitlines() == ["0 False", "1 True", "1 True", "0 False"]


def test_no_warning_on_import() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fresh("import warnings; warnings.simplefilter('error')\nimport inductor_fusions")


AGAIN = """
import importlib, sys, torch
{first}
import inductor_fusions
print(importlib.reload(inductor_fusions).enabled())
for name in [name for name in sys.modules if name.partition(".")[0] == "inductor_fusions"]:
    del sys.modules[name]
try:
    import inductor_fusions
except ImportError as error:
    print(error)
"""


@pytest.mark.parametrize("first", ["", "import torch._inductor.config"], ids=["before", "after Inductor"])
def test_import_again(first: str) -> None:
    """A reload registers nothing twice. Modules that were dropped would: one line says so."""
    reloaded, dropped = fresh(AGAIN.format(first=first)).splitlines()
    assert reloaded == "True" and "dropped from sys.modules" in dropped and "new process" in dropped
