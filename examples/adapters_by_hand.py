"""Adapters written by hand, around a cross-attention as diffusion models write it."""

import torch
from torch import nn

import inductor_fusions


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
for _ in range(3):
    loss = (compiled(x, context) - target).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print("loss", loss.item())
print(inductor_fusions.report())
