"""Every architecture of transformers that can be made small: what is fused of it, and whether it is right.

    python -m tests.models.survey --json bench/results/architectures_cpu.json --jobs 2
    python -m tests.models.survey --only '^(bert|t5)$' --attention sdpa --train

Each is made with random weights and two layers: in sizes of tens; where its configuration takes no such
sizes, with four heads as wide as they are; else in its own sizes. One of more than 150 million parameters is
not made. It runs on a padded batch after the passes, with every fusion that is proved, without Inductor's
code. Outputs (and gradients) are compared with the unfused model and float64. The exit status is 1 where one
is wrong.
"""

from __future__ import annotations

import argparse
import multiprocessing
import re
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from torch.utils import _pytree as pytree

from bench.common import Results
from bench.provenance import environment
from inductor_fusions import config, testing
from inductor_fusions.cli.models import hugging_face_inputs, shrink

BATCH, LENGTH, LAYERS, VOCABULARY = 2, 24, 2, 96
Row = dict[str, Any]
#: The largest model that is made in its own sizes.
PARAMETERS = 150e6
#: Seconds that one model may take.
LIMIT = 240
#: Eps of float32 that an error may have more than 1.5 times that of the unfused model.
SLACK = 16.0

_WIDTHS = (
    "hidden_size d_model n_embd embed_dim dim encoder_hidden_size decoder_hidden_size projection_dim "
    "text_embed_dim vision_embed_dim hidden_dim embedding_size output_hidden_size"
)
_HEADS = (
    "num_attention_heads n_head num_heads encoder_attention_heads decoder_attention_heads attention_heads "
    "n_heads num_encoder_attention_heads num_decoder_attention_heads"
)
_KEY_HEADS = "num_key_value_heads n_head_kv num_kv_heads"
_HEAD_WIDTHS = "head_dim d_kv d_head attention_head_size"
#: Size -> names that configurations have for it.
SIZES = {
    32: f"{_WIDTHS} image_size",
    4: f"{_HEADS} num_experts num_local_experts n_routed_experts moe_num_experts",
    2: f"{_KEY_HEADS} num_experts_per_tok num_experts_per_token moe_topk top_k",
    1: "n_group topk_group",
    48: "intermediate_size ffn_dim encoder_ffn_dim decoder_ffn_dim d_ff n_inner d_inner ffn_hidden_size "
    "moe_intermediate_size shared_expert_intermediate_size",
    8: f"{_HEAD_WIDTHS} patch_size",
    VOCABULARY: "vocab_size",
}
_SMALL = {name: size for size, names in SIZES.items() for name in names.split()}
#: What stays as wide as it is where there are few heads.
_OWN = {*_HEAD_WIDTHS.split(), "patch_size", "image_size"}
#: Which some configurations leave to those who use them.
_UNSAID = {"head_dim", "num_key_value_heads", "num_experts_per_tok", "vocab_size"}
_SPECIAL = {"pad_token_id": 0, "eos_token_id": 2}
_LEFT_OUT = ("model_type", "transformers_version", "architectures", "torch_dtype", "dtype")


def architectures() -> list[str]:
    """The types of models that AutoModel makes, by name."""
    made = transformers.MODEL_MAPPING
    return sorted(name for name, kind in transformers.CONFIG_MAPPING.items() if kind in made)


def small(values: dict[str, Any]) -> dict[str, Any]:
    """A configuration, and those inside it, in sizes of tens; special tokens are in the vocabulary."""
    found = _sized(values, small)
    for name, value in found.items():
        if name in _SMALL and type(value) is int and value > 0:
            found[name] = min(value, _SMALL[name])
        elif name in _UNSAID and value is None:
            found[name] = _SMALL[name]
    return found


def few_heads(values: dict[str, Any]) -> dict[str, Any]:
    """The same with four heads as wide as they are, where other sizes depend on that."""
    found = _sized(values, few_heads)
    heads = [values[name] for name in _HEADS.split() if type(values.get(name)) is int]
    factor = max([1, *(count // 4 for count in heads)])
    divided = {*_WIDTHS.split(), *_HEADS.split(), *_KEY_HEADS.split()}
    for name, value in found.items():
        if value is None and name in _UNSAID and name != "head_dim":
            found[name] = _SMALL[name]
        if name not in _SMALL or name in _OWN or type(value) is not int or value <= 0:
            continue
        found[name] = max(value // factor, 1) if name in divided else min(value, _SMALL[name])
    return found


def _sized(values: dict[str, Any], sized: Callable[[dict[str, Any]], dict[str, Any]]) -> dict[str, Any]:
    """A configuration with special tokens in the vocabulary, and those inside it in other sizes."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        if name in _LEFT_OUT:
            continue
        if isinstance(value, dict) and "model_type" in value:
            found[name] = {**sized(value), "model_type": value["model_type"]}
        elif name.endswith("_token_id") and isinstance(value, list):
            found[name] = 2
        elif name.endswith("_token_id") and type(value) is int and value >= VOCABULARY:
            found[name] = _SPECIAL.get(name, 1)
        elif name == "pad_token_id" and value is None:
            found[name] = _SPECIAL[name]
        else:
            found[name] = value
    return found


def make(name: str, attention: str) -> tuple[torch.nn.Module, dict[str, Any], str]:
    """A model that runs, its inputs, and whether its sizes are "small", "few heads" or its "own".

    Raises:
        RuntimeError: it cannot be made here, with the reasons.
    """
    reasons = []
    for sizes, change in (("small", small), ("few heads", few_heads), ("own", dict)):
        try:
            kind = transformers.CONFIG_MAPPING[name]
            made = kind() if change is dict else kind(**change(kind().to_dict()))
            shrink(made, LAYERS)
            with torch.device("meta"):
                count = sum(p.numel() for p in transformers.AutoModel.from_config(made).parameters())
            if count > PARAMETERS:
                raise RuntimeError(f"{count / 1e6:.0f} million parameters")
            torch.manual_seed(0)
            model = transformers.AutoModel.from_config(made, attn_implementation=attention).eval()
            inputs = hugging_face_inputs(model, BATCH, LENGTH, padded=True)
            if getattr(model.config, "use_cache", None) is not None:
                model.config.use_cache = False
            with torch.no_grad():
                model(**inputs)
            return model, inputs, sizes
        except Exception as error:
            reasons.append(f"{sizes}: {line(error)}")
    raise RuntimeError("; ".join(reasons))


def line(error: BaseException) -> str:
    """An error in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:160]


def survey(name: str, attention: str, train: bool) -> dict[str, Any]:
    """One row: what became of one architecture."""
    row = _row(name, attention, train)
    torch.set_num_threads(1)
    try:
        model, inputs, row["sizes"] = make(name, attention)
    except RuntimeError as error:
        return {**row, "state": "not made", "reason": str(error)}
    return {**row, **judged(model, inputs, train)}


def judged(model: torch.nn.Module, inputs: dict[str, Any], train: bool) -> dict[str, Any]:
    """Whether a model is right with everything fused that is proved, and what is fused and left."""
    if _draws(model, inputs):
        return {"state": "not made", "reason": "it draws random numbers: two runs differ"}
    try:
        seen = testing.check(
            model, inputs, train=train, backend=testing.EAGER_AFTER_PASSES, slack=SLACK, fused=None
        )
    except AssertionError as error:
        return {"state": "wrong", "reason": line(error)}
    except Exception as error:
        state = "wrong" if _runs_without(model, inputs, train) else "not made"
        return {"state": state, "reason": line(error)}
    left = [site for site in seen.sites if site.verdict != "fused"]
    return {
        "state": "right",
        "fused": dict(Counter(site.fusion for site in seen.ours.fused)),
        "left": dict(Counter(site.reason for site in left)),
        "codes": dict(Counter(f"{site.fusion}: {site.code}" for site in left)),
    }


def _draws(model: torch.nn.Module, inputs: dict[str, Any]) -> bool:
    """Whether two runs differ, so that a comparison says nothing."""
    with torch.no_grad():
        first, second = (pytree.tree_leaves(model(**inputs)) for _ in range(2))
    return any(
        isinstance(x, torch.Tensor) and (x.shape != y.shape or not torch.equal(x, y))
        for x, y in zip(first, second, strict=False)
    )


def _runs_without(model: torch.nn.Module, inputs: dict[str, Any], train: bool) -> bool:
    """Whether it compiles without the fusions."""
    try:
        with config.patch(enabled=False):
            testing.capture(model, **inputs, train=train, backend=testing.EAGER_AFTER_PASSES)
    except Exception:
        return False
    return True


def _row(name: str, attention: str, train: bool) -> dict[str, Any]:
    return {"key": key(name, attention, train), "name": name, "attention": attention, "train": train}


def key(name: str, attention: str, train: bool) -> str:
    """What tells the rows of a report apart."""
    return f"{name} {attention}{' train' if train else ''}"


def apart(surveyed: Callable[[], dict[str, Any]], row: dict[str, Any]) -> dict[str, Any]:
    """What a function returns in a process of its own; `row` with the reason where it is late or dies."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=lambda: sender.send(surveyed()))
    start = time.monotonic()
    process.start()
    sender.close()
    try:
        late = {**row, "state": "not made", "reason": f"{LIMIT} seconds were up"}
        row = receiver.recv() if receiver.poll(LIMIT) else late
    except EOFError:
        row |= {"state": "wrong", "reason": "its process died"}
    process.kill()
    process.join()
    return {**row, "seconds": round(time.monotonic() - start, 1)}


def parser(name: str, text: str, only: str) -> argparse.ArgumentParser:
    """Of a survey, whose rows are in a report."""
    found = argparse.ArgumentParser(prog=f"python -m tests.models.{name}", description=text.splitlines()[0])
    found.add_argument("--only", type=re.compile, help=f"{only} (all)")
    found.add_argument("--train", action="store_true", help="gradients as well")
    found.add_argument("--json", type=Path, help="a report, grown row by row and resumed")
    found.add_argument("--jobs", type=int, default=1, help="processes (%(default)s)")
    return found


def run(wanted: Sequence[tuple[Callable[[], Row], Row]], jobs: int, report: Results | None) -> int:
    """The exit status of a survey: 1 where one is wrong.

    Args:
        wanted: what makes a row, and the row as it is where that dies.
        report: takes the rows; those that it has are not made again.
    """
    wrong = 0
    new = [each for each in wanted if report is None or each[1]["key"] not in report]
    with ThreadPoolExecutor(jobs) as pool:
        for done in as_completed([pool.submit(apart, *each) for each in new]):
            row = done.result()
            wrong += row["state"] == "wrong"
            print(f"{row['key']}: {row['state']} {row.get('reason', '')}", file=sys.stderr)
            if report is not None:
                report.append(row)
    return 1 if wrong else 0


def report_in(path: Path | None, name: str, **more: Any) -> Results | None:
    """The report of a survey; None without a path."""
    made = {**environment("cpu", f"tests.models.{name}"), **more}
    return None if path is None else Results(path, made, lambda row: str(row["key"]))


def main(argv: Sequence[str] | None = None) -> int:
    options_of = parser("survey", __doc__, "types of models whose names match")
    options_of.add_argument("--attention", choices=("eager", "sdpa"), action="append", help="(both)")
    options = options_of.parse_args(argv)
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    names = [name for name in architectures() if options.only is None or options.only.search(name)]
    wanted = [
        (name, kind, options.train) for kind in options.attention or ("eager", "sdpa") for name in names
    ]
    rows = [(partial(survey, *each), _row(*each)) for each in wanted]
    return run(rows, options.jobs, report_in(options.json, "survey"))


if __name__ == "__main__":
    sys.exit(main())
