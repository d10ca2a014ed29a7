"""Measure the loss head of a language model against stock: alone, and in a whole training step.

    head n16384 h4096 v128256        a linear and its cross-entropy; `train` with the gradients of hidden
                                     states and weight, `frozen` with those of hidden states alone
    rows n16384 h4096 v128256        log-probabilities of the labels, one for each token
    policy n16384 h4096 v128256      the same and entropies, which take no gradient
    step b2 s4096                    forward and backward of Llama-1B with its loss, without the optimizer

in bfloat16. `stock` and `fused` are timed side by side, by the wall clock and on the device alone, with the
memory that one call needs at its peak; of a step, `before` is the package without this fusion. The loss and
every gradient of a head are compared with float64 first; those of a step with float32, eager.

    python -m bench.loss_head --out bench/results/loss_head_h100.json --budget 170
    python -m bench.loss_head --out bench/results/loss_head_h100.json --table nvidia_h100_80gb_hbm3
    python -m bench.loss_head --quick --device cpu --out /tmp/try.json
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.nn import functional as F

from bench import device_table, interactions, tuning
from bench.common import Json
from bench.interactions import Variant, gain
from bench.models.measure import static_bytes
from inductor_fusions import config
from inductor_fusions.fusions import linear_cross_entropy

#: Every tenth label is left out.
IGNORED = -100
#: Rows that are computed in float64 at a time.
EXACT_ROWS = 1024
#: Of a step's batch, all of the same length.
SEQUENCES = 2


@dataclass(frozen=True)
class Row:
    """One measurement.

    Attributes:
        kind: "head", "rows", "policy" or "step".
        tokens, width, classes: sizes of the linear.
        train: with a backward.
        frozen: the weight takes no gradient.
        checkpointed: layers of a step are computed again in the backward.
    """

    kind: str
    tokens: int
    width: int
    classes: int
    train: bool = True
    frozen: bool = False
    checkpointed: bool = False

    @property
    def key(self) -> str:
        """Its name."""
        sizes = f"n{self.tokens} h{self.width} v{self.classes}" if self.kind != "step" else "b2 s4096"
        found = f"{self.kind} {sizes}" + (" train" if self.train and self.kind != "step" else "")
        return found + (" frozen" if self.frozen else "") + (" checkpointed" if self.checkpointed else "")


def grid(quick: bool) -> list[Row]:
    """What is measured, the most important first."""
    if quick:
        return [
            Row(kind, 64, 32, 512, train, frozen)
            for kind in ("head", "rows", "policy")
            for train, frozen in ((True, False), (True, True), (False, True))
        ]
    llama = 8192, 2048, 128256
    return [
        Row("head", 16384, 4096, 128256),
        Row("step", *llama),
        Row("rows", 16384, 4096, 128256, train=False, frozen=True),
        Row("head", *llama),
        Row("head", 16384, 4096, 128256, frozen=True),
        Row("step", *llama, frozen=True),
        Row("step", *llama, checkpointed=True),
        Row("head", 16384, 4096, 248320),
        Row("head", 16384, 4096, 128256, train=False, frozen=True),
        Row("rows", *llama, train=False, frozen=True),
        Row("rows", 16384, 4096, 128256),
        Row("head", 8192, 2048, 32000),
        Row("head", 16384, 768, 50304),
        Row("head", 4096, 2048, 128256),
        Row("head", 8192, 2304, 256000),
        Row("head", 2048, 2048, 128256),
        Row("head", *llama, train=False, frozen=True),
        Row("head", *llama, frozen=True),
        Row("rows", *llama),
        Row("policy", 16384, 4096, 128256, train=False, frozen=True),
        Row("policy", 16384, 4096, 128256),
        Row("policy", *llama, train=False, frozen=True),
        Row("policy", *llama),
    ]


class Head(nn.Module):
    """A linear, and the cross-entropy of its result with labels; or log-probabilities of the labels, perhaps
    with entropies."""

    def __init__(self, width: int, classes: int, frozen: bool, kind: str) -> None:
        super().__init__()
        weight = torch.randn(classes, width) * width**-0.5
        if frozen:
            self.register_buffer("weight", weight)
        else:
            self.weight = nn.Parameter(weight)
        self.kind, self.each = kind, kind != "head"

    def forward(self, h: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """h (tokens, width), labels (tokens,) -> the loss, (tokens,), or (2, tokens) with entropies."""
        logits = F.linear(h, self.weight).to(torch.promote_types(h.dtype, torch.float32))
        if self.each:
            picked = torch.log_softmax(logits, -1).gather(-1, labels[:, None]).squeeze(-1)
            if self.kind == "rows":
                return picked
            with torch.no_grad():
                entropy = logits.logsumexp(-1) - (torch.softmax(logits, -1) * logits).sum(-1)
            return torch.stack([picked, entropy])
        return F.cross_entropy(logits, labels, ignore_index=IGNORED)


@contextmanager
def as_measured() -> Iterator[None]:
    """The fusion takes what it proves, whatever the tables say; the others as they are by default."""
    with mock.patch.object(linear_cross_entropy.LossHead, "_measured", lambda site: ""):
        yield


def exact(row: Row, module: Head, h: torch.Tensor, labels: torch.Tensor, to: Any) -> interactions.Tensors:
    """The result and its gradients in float64, some rows at a time."""
    wide = copy.deepcopy(module).double()
    count = int((labels != IGNORED).sum())
    results, of_h = [], []
    of_w: torch.Tensor | None = None
    for start in range(0, row.tokens, EXACT_ROWS):
        some = slice(start, start + EXACT_ROWS)
        part, own = h[some].detach().double().requires_grad_(row.train), labels[some]
        share = 1.0 if module.each else int((own != IGNORED).sum()) / count
        cotangent = None if to is None else to[..., some].double() if module.each else to.double() * share
        found = interactions.step(wide, (part, own), wide, cotangent)
        results.append(found[0] if module.each else found[0] * share)
        of_h += found[1:2]
        if len(found) > 2:
            of_w = found[2] if of_w is None else of_w.add_(found[2])
    result = torch.cat(results, -1) if module.each else torch.stack(results).sum()
    gradients = [torch.cat(of_h)] if of_h else []
    return [result, *gradients, *([] if of_w is None else [of_w])]


def measure_head(row: Row, device: str, quick: bool) -> Json:
    """A head, or rows, alone."""
    torch.manual_seed(0)
    module = Head(row.width, row.classes, row.frozen, row.kind).to(device, torch.bfloat16)
    h = torch.randn(row.tokens, row.width, device=device).bfloat16().requires_grad_(row.train)
    labels = torch.randint(row.classes, (row.tokens,), device=device)
    if row.kind == "head":
        labels[::10] = IGNORED
    cotangent = None
    if row.train:
        # A loss gets the gradient that `backward()` of one number has.
        make = torch.rand if module.each else torch.ones
        shape = {"head": (), "rows": (row.tokens,), "policy": (2, row.tokens)}[row.kind]
        cotangent = make(shape, device=device, dtype=torch.float32)
    return interactions.measure(
        module, lambda call: interactions.step(call, (h, labels), module, cotangent),
        lambda: exact(row, module, h, labels, cotangent), torch.bfloat16, "linear_cross_entropy", device,
        quick, {"stock": Variant(), "fused": Variant(as_measured)},
    )  # fmt: skip


class Step(nn.Module):
    """A causal model of transformers that gives its loss alone."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """ids (batch, length) -> the loss, of the next tokens."""
        loss: torch.Tensor = self.model(input_ids=ids, labels=ids, use_cache=False).loss
        return loss


def llama(row: Row, device: str, quick: bool) -> Step:
    """Llama-1B with random weights, in training, with a tied head. Quick: with two layers."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    settings = LlamaConfig(
        vocab_size=row.classes, hidden_size=row.width, intermediate_size=4 * row.width,
        num_hidden_layers=2 if quick else 16, num_attention_heads=row.width // 64,
        num_key_value_heads=row.width // 256, max_position_embeddings=8192, rope_theta=5e5,
        tie_word_embeddings=True, attn_implementation="sdpa",
    )  # fmt: skip
    with torch.device(device):
        model = LlamaForCausalLM(settings).to(torch.bfloat16)
    if row.frozen:  # as adapters leave it: no gradient of the embedding
        model.lm_head.weight.requires_grad_(False)
    if row.checkpointed:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return Step(model.train())


def measure_step(row: Row, device: str, quick: bool) -> Json:
    """A whole training step."""
    module = llama(row, device, quick)
    ids = torch.randint(row.classes, (SEQUENCES, row.tokens // SEQUENCES), device=device)
    watched = [module.model.model.norm.weight, module.model.model.layers[-1].mlp.down_proj.weight]

    def once(call: Callable[..., Any], parts: int = 1) -> list[torch.Tensor]:
        """The loss and some gradients, of as many parts of the batch one after the other."""
        losses = []
        for part in ids.chunk(parts):
            loss = call(part) / parts
            loss.backward()
            losses.append(loss.detach())
        found = [torch.stack(losses).sum(), *(p.grad.clone() for p in watched)]  # type: ignore[union-attr]
        for parameter in module.parameters():
            parameter.grad = None
        return found

    def exact() -> list[torch.Tensor]:
        """In float32, a part of the batch at a time: all of it does not fit beside the model."""
        module.float()
        module.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        with config.patch(enabled=False):
            return once(module, SEQUENCES)

    fixed = static_bytes(module, {"ids": ids})
    before = Variant(lambda: config.patch(linear_cross_entropy=False))
    found = interactions.measure(
        module, once, exact, torch.bfloat16, "linear_cross_entropy", device, quick,
        {"stock": Variant(), "before": before, "fused": Variant(as_measured)},
    )  # fmt: skip
    return {**found, "static_bytes": fixed}


def measure(row: Row, device: str, quick: bool) -> Json:
    """One row of the results."""
    found = (measure_step if row.kind == "step" else measure_head)(row, device, quick)
    if device == "cuda":
        torch._dynamo.reset()
        torch.cuda.empty_cache()
    return {
        "key": row.key, "kind": row.kind, "dtype": "bfloat16", "train": row.train, "frozen": row.frozen,
        "reduced": row.kind not in ("rows", "policy"), "checkpointed": row.checkpointed, "width": row.width,
        "classes": row.classes, "tokens": row.tokens, **found,
    }  # fmt: skip


#: Columns of a row of a table.
COLUMNS = ("dtype", "train", "frozen", "reduced", "width", "classes", "tokens")


def table(path: Path, rows: list[Json]) -> None:
    """Write the heads into the table of a device, in place of those that it has.

    Their gains are those on the device alone: the host of a whole step runs ahead.
    """
    heads = [
        {**row, "times_us": row.get("device_us") or row["times_us"]}
        for row in rows
        if row["kind"] in ("head", "rows")
    ]
    device_table.put(path, "linear_cross_entropy", interactions.table_rows(heads, COLUMNS))


def describe(found: Json) -> str:
    """A row in one line."""
    peak = {name: round(size / 2**30, 2) for name, size in found["peak_bytes"].items() if size is not None}
    return (
        f"{found.get('device_us', found['times_us'])} us, {gain(found)}x, GiB {peak}, "
        f"error {found['error']}, correct {found['correct']}, fused {found['fused']}"
    )


def main() -> None:
    """The command line."""
    tuning.script("bench.loss_head", __doc__, grid, measure, describe, table)


if __name__ == "__main__":
    main()
