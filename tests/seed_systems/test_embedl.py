"""Rows E1 to E7: what embedl_deploy did with FX patterns for TensorRT."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import inductor_fusions
from inductor_fusions import config, testing
from tests import blocks
from tests.seed_systems.support import QUICK, check, fused_on, launched, leaf, padding, qkv
from tests.support.devices import on
from tests.support.packages import skip_unless_they_load

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


# -- E1: nn.MultiheadAttention -------------------------------------------------------------------------


class MHA(nn.Module):
    """torch's module, called as a user does."""

    def __init__(self, batch_first: bool = True, weights: bool = False, **options: Any) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(32, 4, batch_first=batch_first, **options)
        self.weights = weights

    def forward(
        self, q: Any, k: Any, v: Any, *, keys: Any = None, mask: Any = None, causal: bool = False
    ) -> Any:
        found = self.inner(
            q, k, v, key_padding_mask=keys, attn_mask=mask, is_causal=causal, need_weights=self.weights
        )
        return found if self.weights else found[0]


def sequences(batch_first: bool = True, kv_len: int = 24) -> dict[str, torch.Tensor]:
    q, k = leaf(2, 24, 32), leaf(2, kv_len, 32)
    if not batch_first:
        q, k = (t.detach().transpose(0, 1).contiguous().requires_grad_() for t in (q, k))
    return {"q": q, "k": k, "v": k}


def hidden_keys(length: int) -> torch.Tensor:
    keys = torch.zeros(2, length, dtype=torch.bool)
    keys[0, -3:] = True
    return keys


CALLS: dict[str, Callable[[], tuple[nn.Module, dict[str, Any]]]] = {
    "self": lambda: (MHA(), sequences()),
    "sequence first": lambda: (MHA(batch_first=False), sequences(False)),
    "cross": lambda: (MHA(), sequences(kv_len=37)),
    "cross, padded": lambda: (MHA(), {**sequences(kv_len=37), "keys": hidden_keys(37)}),
    "widths of their own": lambda: (MHA(kdim=32, vdim=32, bias=False), sequences(kv_len=37)),
    "causal": lambda: (
        MHA(),
        {**sequences(), "mask": nn.Transformer.generate_square_subsequent_mask(24), "causal": True},
    ),
    "boolean mask": lambda: (MHA(), {**sequences(), "mask": torch.rand(24, 24).tril() > 0.5}),
}


@pytest.mark.parametrize("train", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("name", CALLS)
def test_E1_multihead_attention(name: str, train: bool, device: torch.device) -> None:
    """The attention in it is one kernel, and no scores are written."""
    module, inputs = CALLS[name]()
    if name == "boolean mask":
        inputs["mask"].fill_diagonal_(False)  # each query sees a key
    run = check(module.train(train), inputs, device, fused=None, train=train, backend=QUICK, slack=4.0)
    softmaxes = [*run.ours.calls("softmax"), *run.ours.calls("bmm"), *run.ours.calls("baddbmm")]
    assert not softmaxes
    assert run.ours.calls("scaled_dot_product_attention") or run.ours.calls("multi_head_attention_forward")


@pytest.mark.parametrize("train", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("masked", [None, "causal", "boolean", "keys"])
def test_E1_weights_that_nobody_reads(masked: str | None, train: bool, device: torch.device) -> None:
    """`attention(q, k, v)[0]` asks for weights by default; they are not made."""

    class First(MHA):
        def forward(self, q: Any, k: Any, v: Any, hidden: Any) -> Any:
            i = torch.arange(q.shape[1], device=q.device)
            mask = {"causal": i > i[:, None], "boolean": hidden.expand(24, 24) & (i > 0)}.get(masked or "")
            keys = hidden[None].expand(2, 24) if masked == "keys" else None
            return self.inner(q, k, v, attn_mask=mask, key_padding_mask=keys)[0]

    hidden = torch.arange(24) > 18
    inputs = (*sequences().values(), hidden)
    run = check(First().train(train), inputs, device, train=train, backend=QUICK, slack=4.0)
    (call,) = run.ours.calls("multi_head_attention_forward")
    assert call.kwargs["need_weights"] is False and call.kwargs["is_causal"] is (masked == "causal")


def test_E1_weights_are_asked_for(device: torch.device) -> None:
    """need_weights: unfused, with that reason."""
    run = check(MHA(weights=True), sequences(), device, fused=0, backend=QUICK, slack=4.0)
    (site,) = run.sites
    assert site.code == "weights" and site.hint == "need_weights=False"


# -- E2: shifted windows ---------------------------------------------------------------------------------


SWIN = dict(
    image_size=16, patch_size=2, num_channels=3, embed_dim=16, depths=[2], num_heads=[2], window_size=4,
    hidden_dropout_prob=0.0, drop_path_rate=0.0,
)  # fmt: skip


@pytest.mark.parametrize("name", ["Swin", "Swinv2"])
@pytest.mark.parametrize("train", [False, True], ids=["inference", "training"])
def test_E2_shifted_windows(name: str, train: bool, device: torch.device) -> None:
    """The table of positions with its gradient, and the mask of the shifted window; V2's cosine too."""
    transformers = pytest.importorskip("transformers")
    configuration = getattr(transformers, f"{name}Config")(**SWIN)
    model = getattr(transformers, f"{name}Model")._from_config(configuration, attn_implementation="eager")
    inputs = {"pixel_values": torch.randn(2, 3, 16, 16)}
    check(model.eval(), inputs, device, fused=2, train=train, backend=QUICK, slack=16.0)


# -- E3 to E6: sites --------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", [None, 0.3, 1.0])
@pytest.mark.parametrize("masked", [False, True], ids=["plain", "masked"])
def test_E3_raw_attention(scale: float | None, masked: bool, device: torch.device) -> None:
    """With masks; and the scale is the one of the graph."""

    class Raw(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.drop = nn.Dropout(0.2)

        def forward(self, q: Any, k: Any, v: Any, mask: Any) -> Any:
            scores = torch.matmul(q, k.transpose(-2, -1))
            scores = scores / math.sqrt(q.shape[-1]) if scale is None else scores * scale
            scores = scores + mask if masked else scores
            return torch.matmul(self.drop(torch.softmax(scores, dim=-1)), v)

    inputs = (*qkv(), padding(2, 24))
    run = check(Raw().eval(), inputs, device, backend="inductor" if scale == 0.3 and masked else QUICK)
    for call in run.ours.calls("scaled_dot_product_attention"):
        assert call.kwargs["scale"] == pytest.approx(0.25 if scale is None else scale)


@pytest.mark.parametrize("outs", [(64, 64, 64), (128, 32, 8), (64, 40)], ids=str)
def test_E4_packed_projections(outs: tuple[int, ...], device: torch.device) -> None:
    """Linears of one input with other widths than each other, of which some have a bias."""
    pytest.importorskip("triton")
    from tests.block_mm import support

    model = support.Linears(64, outs, tuple(n == outs[0] for n in outs)).bfloat16()
    x = support.rand(2, 16, 64)
    # Forward; and the gradients of the input, and of the weights.
    assert fused_on(device, model, (x,), train=True, factor=1.5)["qkv"] == 3
    with config.patch(policy="always", strict=True):
        kernels, calls = launched(model, (x,), device)
    assert len(kernels) == 1 and not calls


KEPT: dict[str, dict[str, Any]] = {
    "scale of 1": {"scale": 1.0},
    "another scale": {"scale": 0.7},
    "is_causal": {"is_causal": True},
    "is_causal and a scale": {"is_causal": True, "scale": 1.0},
}


@pytest.mark.parametrize("name", KEPT)
def test_E5_functional_sdpa(name: str, device: torch.device) -> None:
    """A call with a q that is scaled before, or a scale of its own, is kept as it is."""

    def fn(q: Any, k: Any, v: Any) -> Any:
        return F.scaled_dot_product_attention(q * 0.25, k, v, **KEPT[name])

    run = check(fn, qkv(), device, fused=0, backend=QUICK)
    (call,) = run.ours.calls("scaled_dot_product_attention")
    given = {key: value for key, value in call.kwargs.items() if value not in (None, False, 0.0)}
    assert given == KEPT[name]


def test_E5_mask_and_dropout_are_kept(device: torch.device) -> None:
    """A mask of which nothing is proved; one that is proved causal goes, and the scale stays."""

    def masked(q: Any, k: Any, v: Any, mask: Any) -> Any:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=1.0)

    run = check(masked, (*qkv(), padding(2, 24).expand(2, 1, 24, 24)), device, fused=0, backend=QUICK)
    assert run.ours.calls("scaled_dot_product_attention")[0].kwargs["attn_mask"] is not None

    def causal(q: Any, k: Any, v: Any) -> Any:
        i = torch.arange(q.shape[-2], device=q.device)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=i <= i[:, None], scale=1.0)

    run = check(causal, qkv(), device)
    assert "is_causal" in run.ours.fused[0].kernel

    def dropped(q: Any, k: Any, v: Any) -> Any:
        return F.scaled_dot_product_attention(q, k, v, dropout_p=0.3, scale=1.0)

    inputs = [t.to(device) for t in qkv(grad=False)]
    (call,) = testing.capture(dropped, *inputs, backend=QUICK).calls("scaled_dot_product_attention")
    assert call.kwargs["dropout_p"] == 0.3 and call.kwargs["scale"] == 1.0


def test_E6_reasons(caplog: pytest.LogCaptureFixture, device: torch.device) -> None:
    """A site that is left has its reason, a hint and its line, in the report and in the log."""

    def fn(q: Any, k: Any, v: Any) -> Any:
        weights = torch.softmax(q @ k.transpose(-1, -2), -1)
        return weights @ v, weights

    check(fn, qkv(), device, fused=0, reason="weights", backend=QUICK)
    inductor_fusions.clear()
    with config.patch(policy="always"), caplog.at_level("INFO", logger="inductor_fusions"):
        torch.compile(fn, backend=testing.AfterPasses([]))(*on(device, qkv()))
    (site,) = inductor_fusions.report()
    assert site.verdict == "rejected" and site.hint and "test_embedl.py" in site.source
    assert site.reason in caplog.text


# -- E7: deployment ----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_E7_deployment(tmp_path: Path, device: torch.device) -> None:
    """torch.export, an AOTInductor package with a symbolic batch, and the package loaded."""
    if device.type == "cuda":
        skip_unless_they_load()
    model, x = blocks.model(1).eval().to(device), blocks.batch().to(device)
    batch = torch.export.Dim("batch", min=2, max=64)
    exported = torch.export.export(model, (x,), dynamic_shapes=({0: batch},))
    options = {"aot_inductor.compile_wrapper_opt_level": "O0", "aot_inductor.precompile_headers": False}
    inductor_fusions.clear()
    with config.patch(policy="always"):
        package = torch._inductor.aoti_compile_and_package(
            exported, package_path=str(tmp_path / "block.pt2"), inductor_configs=options
        )
    assert inductor_fusions.report().count("fused", "attention") == 1
    run = torch._inductor.aoti_load_package(package)
    for size in (4, 7):
        y = blocks.batch(size).to(device)
        torch.testing.assert_close(run(y), model(y).detach(), rtol=1e-4, atol=1e-5)
