"""The ways to compile the model of a case."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch

import inductor_fusions
from bench.common import Json, collect, fresh_cache, is_fatal, one_line, switched, synchronize
from bench.model_cases import BY_HAND, WITHOUT, Case, build, share_weights, supports_sdpa

#: Measured in every case that has them.
BASIC = ("stock", "fused", "limit", "sdpa", "without", "frozen")
#: Variants whose GEMMs Inductor chooses by timing them.
AUTOTUNED = ("autotuned", "fused_autotuned")

MARKERS = {
    "stock": "verbose_progress",
    "fused": "comment_origin",
    "limit": "debug_fusion",
    "sdpa": "debug",
    "without": "force_shape_pad",
    "frozen": "keep_output_stride",
    "autotuned": "debug_index_asserts",
    "fused_autotuned": "generate_intermediate_hooks",
}
"""Dynamo shares compiled code between equal backends, and backends are equal if their options are. So each
variant names one Inductor option of its own, at the value that it has anyway."""


class Load(Protocol):
    """What a variant asks of its case."""

    @property
    def mode(self) -> str:
        """The mode of torch.compile."""

    @property
    def train(self) -> bool:
        """Whether a step has a backward."""


@dataclass
class Variant:
    """One way to compile the model of a case.

    Attributes:
        name: one of `MARKERS`, or "uncompiled".
        model: the model.
        compiled: the model under `torch.compile`.
        case: the load.
        inputs: keyword arguments of the model.
        sites: what the fusions made of it.
        leaf: what is differentiated where no parameter is: the embedded tokens.
    """

    name: str
    model: torch.nn.Module
    compiled: Callable[..., Any]
    case: Load
    inputs: dict[str, Any]
    sites: list[Any] = field(default_factory=list)
    leaf: torch.Tensor | None = None

    @property
    def fuses(self) -> bool:
        """Whether it is compiled with inductor_fusions switched on."""
        return self.name in ("fused", "fused_autotuned", "frozen")

    def output(self) -> torch.Tensor:
        """The last hidden state, with a graph in training."""
        if self.case.mode != "default":
            torch.compiler.cudagraph_mark_step_begin()
        with torch.set_grad_enabled(self.case.train):
            hidden: torch.Tensor = self.compiled(**self.inputs).last_hidden_state
        return hidden

    def step(self) -> None:
        """One inference, or one training step without the optimizer."""
        if not self.case.train:
            self.output()
            return
        self.forget()
        self.output().float().pow(2).mean().backward()

    def forget(self) -> None:
        """Drop the gradients."""
        self.model.zero_grad(set_to_none=True)
        if self.leaf is not None:
            self.leaf.grad = None

    @contextlib.contextmanager
    def switched(self) -> Iterator[None]:
        """inductor_fusions on or off, as the name says; afterwards as before."""
        disabled = torch._inductor.config.patch(force_disable_caches=True)
        with switched(self.fuses), fresh_cache(), disabled:
            yield

    def first_step(self, device: str) -> float:
        """Compile, from empty caches; the seconds."""
        forget = getattr(inductor_fusions, "clear", None)
        with self.switched():
            if callable(forget):
                forget()
            start = time.perf_counter()
            self.step()
            synchronize(device)
            seconds = time.perf_counter() - start
            report = getattr(inductor_fusions, "report", None)
            if self.fuses and callable(report):
                self.sites = list(report())
        return seconds


def wanted_variants(case: Case, asked: Sequence[str] = ()) -> tuple[str, ...]:
    """The variants to measure of a case: what was asked for, or those that it has of itself."""
    return tuple(asked) or (*BASIC, *(AUTOTUNED if case.autotuned else ()))


def compile_mode(name: str, case: Case) -> str:
    """The mode of torch.compile of a variant."""
    if name not in AUTOTUNED:
        return case.mode
    return "max-autotune-no-cudagraphs" if case.mode == "default" else "max-autotune"


def make_variant(name: str, model: torch.nn.Module, case: Case, inputs: dict[str, Any]) -> Variant:
    """A variant that is not compiled yet."""
    from torch._inductor import config, list_mode_options

    marker = MARKERS[name]
    options = {**list_mode_options(compile_mode(name, case)), marker: getattr(config, marker)}
    compiled: Any = torch.compile(model, options=options, dynamic=False)
    return Variant(name, model, compiled, case, inputs)


def make_variants(
    case: Case,
    model: torch.nn.Module,
    inputs: dict[str, Any],
    wanted: Sequence[str],
    device: str,
    quick: bool,
) -> dict[str, Variant]:
    """Every variant that the case has; all of them share one set of weights."""
    implementations = {"stock": case.attn, "fused": case.attn}
    if case.by_hand:
        implementations["limit"] = BY_HAND if case.by_hand == "causal" else case.by_hand
    if case.bounded:
        implementations["without"] = WITHOUT
    # The sdpa path of a model with softcap leaves it out.
    softcap = getattr(model.config, "attn_logit_softcapping", None)
    if case.attn == "eager" and supports_sdpa(model) and softcap is None:
        implementations["sdpa"] = "sdpa"
    if case.mode != "max-autotune":
        implementations |= dict.fromkeys(AUTOTUNED, case.attn)
    if case.adapters is not None:
        implementations["frozen"] = case.attn
    variants: dict[str, Variant] = {}
    for name, attn in implementations.items():
        if name not in wanted:
            continue
        own, leaf, given = model, None, inputs
        if name == "frozen":
            own = build(replace(case, adapters=None), attn, device, quick).requires_grad_(False)
            if case.train:
                given = dict(inputs)
                embedded = own.get_input_embeddings()(given.pop("input_ids"))
                leaf = given["inputs_embeds"] = embedded.detach().requires_grad_()
        elif attn != case.attn:
            own = build(case, attn, device, quick)
            share_weights(model, own)
        variants[name] = make_variant(name, own, case, given)
        variants[name].leaf = leaf
    return variants


def uncompiled(case: Case, model: torch.nn.Module, inputs: dict[str, Any]) -> Variant:
    """The model without torch.compile."""
    return Variant("uncompiled", model, model, case, inputs)


def compile_variants(
    variants: dict[str, Variant], repeats: int, fused_first: bool, device: str, say: Callable[[str], None]
) -> tuple[Json, dict[str, list[float]]]:
    """First steps of each; those that fail are taken out.

    Stock and fused are compiled `repeats` times, in turns; the last compile is the one that is timed.

    Returns:
        The reason of each that failed, and the seconds of every first step.
    """
    failed: Json = {}
    seconds: dict[str, list[float]] = {}
    for i in range(repeats):
        pair = ["fused", "stock"] if fused_first != (i % 2 == 1) else ["stock", "fused"]
        # Hugging Face's flex attention may reset Dynamo when it is first used, which drops what is compiled.
        order = ["limit", "sdpa", "without", "frozen", *pair, *AUTOTUNED]
        torch._dynamo.reset()
        for name in sorted(variants, key=order.index):
            if name not in ("stock", "fused") and i + 1 < repeats:
                continue
            say(f"compiling {name}")

            def compile_once(name: str = name) -> None:
                seconds.setdefault(name, []).append(variants[name].first_step(device))

            attempt(name, compile_once, variants, failed, device)
    return failed, seconds


def attempt(
    name: str, action: Callable[[], None], variants: dict[str, Variant], failed: Json, device: str
) -> None:
    """Run a variant; one that raises is taken out, with the reason in `failed`.

    Raises:
        Exception: the device is unusable after it.
    """
    try:
        return action()
    except Exception as error:
        if is_fatal(error):
            raise
        failed[name] = one_line(error, 300)
    # Here the exception is gone, and with it the tensors that its frames hold.
    variants.pop(name).forget()
    collect(device)
