"""Self-test with a torch newer than those tested, before the first graph is changed."""

from __future__ import annotations

import functools
import warnings

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from .. import _inductor, config
from ..fusion import Fusion, Rejected
from ..sites import error_text
from . import matching


@functools.cache
def problem(stage: str, fusions: tuple[Fusion, ...]) -> str:
    """Why the fusions of a stage cannot be used with this torch, or "".

    A torch that was tested has none. With a newer one, torch's private parts are called, and in the stage
    "pre_grad" a small attention is fused and compared; one warning says how it went.
    """
    if not _inductor.beyond_tested():
        return ""
    newest = ".".join(map(str, _inductor.NEWEST_TESTED))
    said = f"inductor_fusions: torch {torch.__version__} is newer than {newest}, the last one tested"
    try:
        _inductor.probe()
        found = _attempt(fusions) if stage == "pre_grad" else ""
    except Exception as error:
        found = error_text(error)
    if found:
        _warn(f"{said}; its self-test failed, so nothing is fused: {found}")
    elif stage == "pre_grad":
        _warn(f"{said}; its self-test passed, so fusions are on")
    return found


_warned: set[str] = set()


def _warn(text: str) -> None:
    if text not in _warned:
        _warned.add(text)
        warnings.warn(text, stacklevel=3)


def _attempt(fusions: tuple[Fusion, ...]) -> str:
    """Fuse a small attention and compare it with the unfused one; returns what is wrong, or ""."""
    with _inductor.without_modes(), config.patch(policy="always"), torch.no_grad():
        values = torch.arange(3 * 2 * 5 * 8, device="cpu", dtype=torch.float32)
        inputs = tuple(values.sin().view(3, 1, 2, 5, 8).unbind())
        module = make_fx(_attention, tracing_mode="fake", pre_dispatch=True)(*inputs)
        expected = module(*inputs)
        for fusion in fusions:
            for candidate in matching.candidates(fusion, module.graph):
                try:
                    candidate.guard()
                except Rejected:
                    continue
                candidate.rewrite()
        module.graph.lint()
        fused = fx.GraphModule(module, module.graph)(*inputs)
        if not torch.allclose(fused, expected, rtol=1e-4, atol=1e-5):
            return "a fused attention differs from the unfused one"
    return ""


def _attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    place = torch.arange(q.shape[-2], device=q.device)
    scores = (q @ k.transpose(-2, -1) * 0.3).masked_fill(place > place[:, None], -1e9)
    return torch.softmax(scores, dim=-1) @ v
