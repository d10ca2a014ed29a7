"""The models of the ledger, with layers, heads and widths cut down."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch

from bench import model_cases, recommendation
from bench.common import Json
from devtools.ledger.rows import series

DTYPES = ("bfloat16", "float32")
HEADS = 4
#: Cases of the quick check.
QUICK = (
    "bert-base eager padded", "llama-1b sdpa", "gpt2 eager", "llama-1b lora float32", "dlrm outer product",
    "dlrm dot products",
)  # fmt: skip
#: Names of a configuration for the number of heads, of shared heads, and for what is a multiple of the heads.
_HEADS = (
    "num_attention_heads", "n_head", "num_heads", "encoder_attention_heads", "decoder_attention_heads",
)  # fmt: skip
_SHARED = ("num_key_value_heads",)
_WIDTHS = (
    "hidden_size intermediate_size n_embd n_inner d_model d_ff ffn_dim encoder_ffn_dim decoder_ffn_dim "
    "word_embed_proj_dim"
).split()


@dataclass(frozen=True)
class Entry:
    """One model to compile.

    Attributes:
        model: as in the names of its rows.
        train: forward and backward.
        dtype: of the model.
        make: builds it, with the keyword arguments that it is called with.
    """

    model: str
    train: bool
    dtype: str
    make: Callable[[], tuple[torch.nn.Module, Json]]

    @property
    def name(self) -> str:
        """As in the names of its rows."""
        return f"{self.model} {self.mode} {self.dtype}"

    @property
    def mode(self) -> str:
        """ "inference" or "training"."""
        return "training" if self.train else "inference"

    def header(self, device: str) -> Json:
        """What names a row."""
        names = {"model": self.model, "mode": self.mode, "dtype": self.dtype}
        return {**names, "device": device, "torch": series()}


def entries(quick: bool = False) -> list[Entry]:
    """Each kind of model and attention that is measured: inference in each dtype, training in the first.

    Then models with adapters, and those of recommendation.
    """
    found = _of_models(quick)
    for adapters in DTYPES:
        for load, seq, modes in (("", 128, (False, True)), (" decode", 1, (False,))):
            for train in modes:
                own = model_cases.Adapters(dtype=adapters)
                case = model_cases.Case("ledger", "llama-1b", "sdpa", 1, seq, train, adapters=own)
                name = f"llama-1b lora {adapters}{load}"
                found.append(Entry(name, train, DTYPES[0], partial(_model, case)))
    for interaction in recommendation.MODELS:
        for train in (False, True):
            made = partial(_recommendation, interaction)
            found.append(Entry(f"dlrm {interaction}", train, DTYPES[0], made))
    return [each for each in found if not quick or each.model in QUICK]


def _of_models(quick: bool) -> list[Entry]:
    found: dict[str, Entry] = {}
    for case in model_cases.CASES:
        words = [case.model, case.attn]
        words += ["padded"] * case.padded + ["packed"] * (case.documents > 0)
        words += ["cache"] * case.use_cache + ["dropout"] * (case.dropout > 0)
        load = " ".join(words)
        trains = (True,) if case.dropout > 0 else (False,) if case.use_cache else (False, True)
        for train in trains:
            for dtype in DTYPES[:1] if quick or train else DTYPES:
                small = replace(
                    model_cases.quick_case(case), name=load, train=train, dtype=dtype, mode="default"
                )
                entry = Entry(load, train, dtype, partial(_model, small))
                found.setdefault(entry.name, entry)
    return list(found.values())


def _model(case: model_cases.Case) -> tuple[torch.nn.Module, Json]:
    model = model_cases.build(case, case.attn, "cpu", quick=True)
    return model, model_cases.make_inputs(case, narrow(case, True)[1], "cpu")


def _recommendation(interaction: str) -> tuple[torch.nn.Module, Json]:
    torch.manual_seed(0)
    model = recommendation.MODELS[interaction](entries=10).bfloat16()
    sparse = torch.randint(0, 10, (256, len(model.tables)))
    return model, {"dense": torch.randn(256, 13).bfloat16(), "sparse": sparse}


def narrow(case: model_cases.Case, quick: bool) -> tuple[str, Json]:
    """The configuration of a case, in the sizes of its quick form, with few heads of the same head dim."""
    architecture, values = _full_config(case, True)
    heads = next((values[n] for n in _HEADS if isinstance(values.get(n), int)), HEADS)
    if "depths" in values:  # one stage, with and without shifted windows
        values |= {"depths": [2], "num_heads": [HEADS], "embed_dim": 32 * HEADS}
    if "num_local_experts" in values:
        values |= {"num_local_experts": 4, "num_experts_per_tok": 2}
    if heads > HEADS:
        for name in _HEADS:
            if isinstance(values.get(name), int):
                values[name] = HEADS
        for name in _WIDTHS:
            if isinstance(values.get(name), int):  # kernels of half precision ask for multiples
                values[name] = -(-values[name] * HEADS // heads // 64) * 64
        for name in _SHARED:
            if isinstance(values.get(name), int):
                values[name] = max(1, values[name] * HEADS // heads)
    return architecture, values


_full_config = model_cases.model_config
