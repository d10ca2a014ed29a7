"""What a newcomer does: a training script as it is, with one line more, or none through `run`.

Each script runs for a few steps on a tiny model, and its losses are those of the same script uncompiled.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

LLAMA = """
import inductor_fusions
import torch
from transformers import LlamaConfig, LlamaForCausalLM

torch.manual_seed(0)
model = LlamaForCausalLM(LlamaConfig(
    vocab_size=96, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2,
    intermediate_size=48, max_position_embeddings=32, pad_token_id=0, bos_token_id=1, eos_token_id=2,
))
ids = torch.randint(3, 96, (8, 12), generator=torch.Generator().manual_seed(1))
"""

#: With attention written out, as in models that are no Llama.
WRITTEN_OUT = LLAMA.replace("eos_token_id=2,", 'eos_token_id=2, attn_implementation="eager",')

TRAINER = (
    LLAMA
    + """
from transformers import Trainer, TrainingArguments

data = [{"input_ids": row, "labels": row} for row in ids]
arguments = TrainingArguments(
    "out", max_steps=3, per_device_train_batch_size=4, torch_compile=True, logging_steps=1, report_to=[],
    save_strategy="no", disable_tqdm=True, use_cpu=not torch.cuda.is_available(),
)
trainer = Trainer(model=model, args=arguments, train_dataset=data)
trainer.train()
for row in trainer.state.log_history:
    if "loss" in row:
        print("loss", row["loss"])
print(inductor_fusions.report())
"""
)

ACCELERATE = (
    WRITTEN_OUT
    + """
from accelerate import Accelerator
from accelerate.utils import TorchDynamoPlugin

accelerator = Accelerator(
    cpu=not torch.cuda.is_available(), dynamo_plugin=TorchDynamoPlugin(backend="inductor"),
)
model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
ids = ids.to(accelerator.device)
for step in range(3):
    loss = model(input_ids=ids, labels=ids).loss
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    print("loss", loss.item())
print(inductor_fusions.report())
"""
)

PEFT = (
    WRITTEN_OUT
    + """
from peft import LoraConfig, get_peft_model

model = get_peft_model(model, LoraConfig(
    r=4, lora_alpha=8, lora_dropout=0.0, target_modules=["q_proj", "k_proj", "v_proj"], task_type="CAUSAL_LM",
))
compiled = torch.compile(model)
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
for step in range(3):
    loss = compiled(input_ids=ids, labels=ids).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print("loss", loss.item())
print(inductor_fusions.report())
"""
)

DIFFUSION = """
import inductor_fusions
import torch
from torch import nn


class LoraLinear(nn.Module):
    def __init__(self, inputs, outputs, rank=4, alpha=4.0, bias=False):
        super().__init__()
        self.base = nn.Linear(inputs, outputs, bias=bias).requires_grad_(False)
        self.down, self.up = nn.Linear(inputs, rank, bias=False), nn.Linear(rank, outputs, bias=False)
        nn.init.normal_(self.down.weight, std=1 / rank)
        nn.init.normal_(self.up.weight, std=0.02)
        self.scale = alpha / rank

    def forward(self, x):
        return self.base(x) + self.scale * self.up(self.down(x))


class CrossAttention(nn.Module):
    def __init__(self, width=32, heads=4, context=24):
        super().__init__()
        self.heads, self.scale = heads, (width // heads) ** -0.5
        self.to_q = LoraLinear(width, width)
        self.to_k, self.to_v = LoraLinear(context, width), LoraLinear(context, width)
        self.to_out = nn.ModuleList([LoraLinear(width, width, bias=True), nn.Dropout(0.0)])

    def split(self, t):
        batch, length, width = t.shape
        t = t.reshape(batch, length, self.heads, width // self.heads).permute(0, 2, 1, 3)
        return t.reshape(batch * self.heads, length, width // self.heads)

    def forward(self, x, context):
        q, k, v = self.split(self.to_q(x)), self.split(self.to_k(context)), self.split(self.to_v(context))
        empty = torch.empty(q.shape[0], q.shape[1], k.shape[1], dtype=q.dtype, device=q.device)
        scores = torch.baddbmm(empty, q, k.transpose(-1, -2), beta=0, alpha=self.scale)
        out = torch.bmm(scores.softmax(dim=-1).to(v.dtype), v)
        out = out.reshape(x.shape[0], self.heads, x.shape[1], -1).permute(0, 2, 1, 3).reshape(x.shape)
        for layer in self.to_out:
            out = layer(out)
        return x + out


torch.manual_seed(0)
model = CrossAttention()
x, context, target = torch.randn(2, 16, 32), torch.randn(2, 7, 24), torch.randn(2, 16, 32)
compiled = torch.compile(model)
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
for step in range(3):
    loss = (compiled(x, context) - target).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print("loss", loss.item())
print(inductor_fusions.report())
"""

NANO = """
import argparse
import math

import torch
from torch import nn
from torch.nn import functional as F

parser = argparse.ArgumentParser()
parser.add_argument("--max_iters", type=int, default=100)
arguments = parser.parse_args()


class SelfAttention(nn.Module):
    def __init__(self, width, heads, block):
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.attn_dropout, self.heads = nn.Dropout(0.0), heads
        self.register_buffer("mask", torch.tril(torch.ones(block, block)).view(1, 1, block, block))

    def forward(self, x):
        B, T, C = x.size()
        q, k, v = self.c_attn(x).split(C, dim=2)
        q, k, v = (t.view(B, T, self.heads, C // self.heads).transpose(1, 2) for t in (q, k, v))
        att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        att = att.masked_fill(self.mask[:, :, :T, :T] == 0, float("-inf"))
        att = self.attn_dropout(F.softmax(att, dim=-1))
        y = (att @ v).transpose(1, 2).contiguous().view(B, T, C)
        return self.c_proj(y)


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn = SelfAttention(width, 4, 16)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self, vocabulary=65, width=32):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocabulary, width), nn.Embedding(16, width)
        self.h, self.ln_f = nn.ModuleList([Block(width)]), nn.LayerNorm(width)
        self.lm_head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, ids, targets):
        x = self.wte(ids) + self.wpe(torch.arange(ids.size(1), device=ids.device))
        for block in self.h:
            x = block(x)
        logits = self.lm_head(self.ln_f(x))
        return F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1))


if __name__ == "__main__":
    torch.manual_seed(1337)
    model = GPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    compiled = torch.compile(model)
    for it in range(arguments.max_iters):
        data = torch.randint(65, (4, 17))
        loss = compiled(data[:, :-1].contiguous(), data[:, 1:].contiguous())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        print("loss", loss.item())
"""


def start(folder: Path, *command: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run in a folder that is not the repository, as a user does."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    env: Mapping[str, str] = {**os.environ, "PYTHONPATH": path, **variables}
    done = subprocess.run(
        [sys.executable, *command], cwd=folder, env=env, capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def losses(text: str) -> list[float]:
    return [float(number) for number in re.findall(r"^loss (\S+)$", text, re.MULTILINE)]


#: As it is, and then once more as it would run uncompiled: importing takes longer than a tiny model.
TWICE = """
import runpy
runpy.run_path("train.py", run_name="__main__")
print("uncompiled")
import torch
torch._dynamo.config.disable = True
runpy.run_path("train.py", run_name="__main__")
"""

SCRIPTS = {
    "transformers.Trainer": (TRAINER, "transformers", "profitable"),
    "accelerate": (ACCELERATE, "accelerate", "always"),
    "PEFT": (PEFT, "peft", "always"),
    "diffusers": (DIFFUSION, "torch", "always"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SCRIPTS)
def test_one_line_more(name: str, tmp_path: Path) -> None:
    """`import inductor_fusions` at the top, and nothing else."""
    text, needs, policy = SCRIPTS[name]
    pytest.importorskip(needs)
    (tmp_path / "train.py").write_text(text)
    ours, _, eager = start(tmp_path, "-c", TWICE, INDUCTOR_FUSIONS_POLICY=policy).stdout.partition(
        "uncompiled"
    )
    assert re.search(r"1\s+attention\s+fused", ours), ours
    if name in ("PEFT", "diffusers"):  # the adapters are found; without a GPU they are left, with the reason
        assert re.search(r"\d+\s+lora\s+(fused|left to stock)", ours), ours
    assert len(losses(ours)) == 3 and losses(ours) == pytest.approx(losses(eager), rel=1e-3)


@pytest.mark.slow
def test_no_line_more(tmp_path: Path) -> None:
    """A script in the manner of nanoGPT, through `python -m inductor_fusions run`."""
    (tmp_path / "train.py").write_text(NANO)
    command = ("-m", "inductor_fusions", "run", "--json", "report.json", "train.py", "--max_iters", "3")
    ours = start(tmp_path, *command, INDUCTOR_FUSIONS_POLICY="always").stdout
    sites = json.loads((tmp_path / "report.json").read_text())["sites"]
    assert [site["verdict"] for site in sites if site["fusion"] == "attention"] == ["fused"]
    eager = start(tmp_path, "train.py", "--max_iters", "3", TORCH_COMPILE_DISABLE="1").stdout
    assert len(losses(ours)) == 3 and losses(ours) == pytest.approx(losses(eager), rel=1e-3)
