"""Attention in vision: U-Nets of diffusion, autoencoders, windows, decoders of masks, matching."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from .form import form, linears, named

einsum = torch.einsum


@form((2, 32, 4, 5), parts=lambda: dict(qkv=nn.Conv2d(32, 96, 1, bias=False), out=nn.Conv2d(32, 32, 1)))
def unet_one_by_one_qkv(net: Any, x: Any) -> Any:
    """q, k and v of a 1x1 convolution, channels first, products by einsum."""
    b, _, h, w = x.shape
    q, k, v = (t.reshape(b, 4, 8, h * w) for t in net.qkv(x).chunk(3, dim=1))
    sim = einsum("b h d i, b h d j -> b h i j", q * 8**-0.5, k)
    sim = sim - sim.amax(dim=-1, keepdim=True).detach()
    out = einsum("b h i j, b h d j -> b h i d", sim.softmax(dim=-1), v)
    return net.out(out.permute(0, 1, 3, 2).reshape(b, 32, h, w)) + x


@form((2, 96, 20))
def guided_qkv(qkv: Any) -> Any:
    """The square root of the scale on q and on k, softmax in float32."""
    bs, width, length = qkv.shape
    ch = width // 12
    q, k, v = qkv.reshape(bs * 4, ch * 3, length).split(ch, dim=1)
    scale = 1 / math.sqrt(math.sqrt(ch))
    weight = einsum("bct,bcs->bts", q * scale, k * scale)
    weight = torch.softmax(weight.float(), dim=-1).type(weight.dtype)
    return einsum("bts,bcs->bct", weight, v).reshape(bs, -1, length)


@form((2, 96, 20))
def guided_qkv_split_first(qkv: Any) -> Any:
    bs, width, length = qkv.shape
    ch = width // 12
    q, k, v = qkv.chunk(3, dim=1)
    scale = ch**-0.25
    weight = einsum(
        "bct,bcs->bts", (q * scale).view(bs * 4, ch, length), (k * scale).view(bs * 4, ch, length)
    )
    weight = F.softmax(weight, dim=-1)
    return einsum("bts,bcs->bct", weight, v.reshape(bs * 4, ch, length)).reshape(bs, -1, length)


@form(
    (2, 16, 4, 5),
    parts=lambda: (
        dict(norm=nn.GroupNorm(4, 16)) | named("q k v proj", (nn.Conv2d(16, 16, 1) for _ in range(4)))
    ),
)
def autoencoder_block(net: Any, x: Any) -> Any:
    """One head over the pixels; the weights are the right operand."""
    h_ = net.norm(x)
    q, k, v = net.q(h_), net.k(h_), net.v(h_)
    b, c, h, w = q.shape
    q = q.reshape(b, c, h * w).permute(0, 2, 1)
    k = k.reshape(b, c, h * w)
    w_ = torch.bmm(q, k) * int(c) ** (-0.5)
    w_ = F.softmax(w_, dim=2)
    v = v.reshape(b, c, h * w)
    h_ = torch.bmm(v, w_.permute(0, 2, 1)).reshape(b, c, h, w)
    return x + net.proj(h_)


@form((2, 16, 4, 5), parts=lambda: named("theta phi g", (nn.Conv2d(16, 8, 1) for _ in range(3))) | dict(
    out=nn.Conv2d(8, 16, 1), pool=nn.MaxPool2d(2),
))  # fmt: skip
def non_local_block(net: Any, x: Any) -> Any:
    """Embedded Gaussian: keys and values at half the size, no scale."""
    b = x.size(0)
    g = net.pool(net.g(x)).view(b, 8, -1).permute(0, 2, 1)
    theta = net.theta(x).view(b, 8, -1).permute(0, 2, 1)
    phi = net.pool(net.phi(x)).view(b, 8, -1)
    f = torch.matmul(theta, phi)
    y = torch.matmul(F.softmax(f, dim=-1), g)
    return net.out(y.permute(0, 2, 1).contiguous().view(b, 8, *x.shape[2:])) + x


@form((2, 16, 4, 5), parts=lambda: dict(
    f=nn.Conv2d(16, 4, 1), g=nn.Conv2d(16, 4, 1), h=nn.Conv2d(16, 16, 1),
    gamma=nn.Parameter(torch.tensor([0.5])),
))  # fmt: skip
def self_attention_gan(net: Any, x: Any) -> Any:
    """Keys over dim 1 of the transposed product, a learned gain behind."""
    size = x.size()
    x = x.view(*size[:2], -1)
    f, g, h = (m(x.view(size)).flatten(2) for m in (net.f, net.g, net.h))
    beta = F.softmax(torch.bmm(f.transpose(1, 2), g), dim=1)
    return (net.gamma * torch.bmm(h, beta) + x).view(*size).contiguous()


@form((2, 16, 4, 5), fused=0, reasons=("no-product", "no-product"), parts=lambda: dict(
    qkv=nn.Conv2d(16, 48, 1, bias=False),
))  # fmt: skip
def linear_attention_block(net: Any, x: Any) -> Any:
    """softmax of k over the tokens: a context first, no scores."""
    b, c, h, w = x.shape
    q, k, v = (t.reshape(b, 2, 8, h * w) for t in net.qkv(x).chunk(3, dim=1))
    q, k = q.softmax(dim=-2) * 8**-0.5, k.softmax(dim=-1)
    context = einsum("bhdn,bhen->bhde", k, v)
    return einsum("bhde,bhdn->bhen", context, q).reshape(b, c, h, w)


@form((2, 16, 32), (2, 9, 24))
class CrossAttentionOfText(nn.Module):
    """Heads merged into the batch, baddbmm with beta=0 into an empty tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = nn.Linear(32, 32, False), nn.Linear(24, 32, False), nn.Linear(24, 32, False)

    def heads(self, t: Any) -> Any:
        b, n, d = t.shape
        return t.reshape(b, n, 4, d // 4).permute(0, 2, 1, 3).reshape(b * 4, n, d // 4)

    def forward(self, x: Any, context: Any) -> Any:
        q, k, v = self.heads(self.q(x)), self.heads(self.k(context)), self.heads(self.v(context))
        empty = torch.empty(q.shape[0], q.shape[1], k.shape[1], dtype=q.dtype, device=q.device)
        scores = torch.baddbmm(empty, q, k.transpose(-1, -2), beta=0, alpha=8**-0.5)
        probs = scores.softmax(dim=-1).to(v.dtype)
        out = torch.bmm(probs, v)
        return out.reshape(2, 4, 16, 8).permute(0, 2, 1, 3).reshape(2, 16, 32)


@form(
    (2, 16, 32), (2, 9, 32), lambda: torch.rand(2, 9) > 0.3, parts=lambda: dict(qkv=linears(32, 32, 32, 32))
)
def cross_attention_masked(net: Any, x: Any, context: Any, mask: Any) -> Any:
    """A mask of keys, repeated for the heads in the batch, ~mask filled with -finfo.max in place."""
    b, h = x.shape[0], 4
    mask = mask.clone()
    mask[:, 0] = True
    q, k, v = net.qkv[0](x), net.qkv[1](context), net.qkv[2](context)
    q, k, v = (t.view(b, -1, h, 8).transpose(1, 2).reshape(b * h, -1, 8) for t in (q, k, v))
    sim = einsum("b i d, b j d -> b i j", q, k) * 8**-0.5
    mask = mask.reshape(b, -1)[:, None, None, :].expand(b, h, 1, -1).reshape(b * h, 1, -1)
    sim.masked_fill_(~mask, -torch.finfo(sim.dtype).max)
    attn = sim.softmax(dim=-1)
    out = einsum("b i j, b j d -> b i d", attn, v)
    return out.view(b, h, -1, 8).transpose(1, 2).reshape(b, -1, 32)


class Window(nn.Module):
    """Windows of an image with a table of relative positions, and a mask of shifted windows."""

    def __init__(self, cosine: bool = False) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(16, 48), nn.Linear(16, 16)
        self.table = nn.Parameter(torch.randn(25, 2) * 0.3)
        coords = torch.stack(torch.meshgrid(torch.arange(3), torch.arange(3), indexing="ij")).flatten(1)
        relative = (coords[:, :, None] - coords[:, None, :]).permute(1, 2, 0) + 2
        self.register_buffer("index", relative[..., 0] * 5 + relative[..., 1])
        self.logit_scale = nn.Parameter(torch.log(10 * torch.ones(2, 1, 1))) if cosine else None

    def forward(self, x: Any, mask: Any = None) -> Any:
        b_, n, c = x.shape
        qkv = self.qkv(x).reshape(b_, n, 3, 2, c // 2).permute(2, 0, 3, 1, 4)
        q, k, v = qkv[0], qkv[1], qkv[2]
        if self.logit_scale is None:
            attn = (q * 8**-0.5) @ k.transpose(-2, -1)
        else:
            attn = F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).transpose(-2, -1)
            attn = attn * torch.clamp(self.logit_scale, max=math.log(1.0 / 0.01)).exp()
        bias = self.table[self.index.view(-1)].view(n, n, -1).permute(2, 0, 1).contiguous()
        if self.logit_scale is not None:
            bias = 16 * torch.sigmoid(bias)
        attn = attn + bias.unsqueeze(0)
        if mask is not None:
            nw = mask.shape[0]
            attn = attn.view(b_ // nw, nw, 2, n, n) + mask.unsqueeze(1).unsqueeze(0)
            attn = attn.view(-1, 2, n, n)
        attn = attn.softmax(dim=-1)
        return self.proj((attn @ v).transpose(1, 2).reshape(b_, n, c))


def shifted() -> torch.Tensor:
    """(4 windows, 9, 9): 0 and -100, as Swin has it."""
    which = torch.randint(0, 2, (4, 9))
    difference = which.unsqueeze(1) - which.unsqueeze(2)
    return difference.float().masked_fill(difference != 0, -100.0)


form((8, 9, 16))(type("WindowsPlain", (Window,), {}))
form((8, 9, 16), shifted)(type("WindowsShifted", (Window,), {}))
form((8, 9, 16), shifted)(
    type("WindowsCosine", (Window,), {"__init__": lambda self: Window.__init__(self, cosine=True)})
)


@form((2, 12, 12, 16), fused=2)
def axial_rows_then_columns(x: Any) -> Any:
    """Rows, then columns, both with the other axis as batch."""
    for axis in (1, 2):
        t = x.transpose(axis, 2)
        q = k = v = t.unflatten(-1, (2, 8)).transpose(2, 3)
        a = (q @ k.transpose(-1, -2) / 8**0.5).softmax(-1)
        x = x + (a @ v).transpose(2, 3).flatten(3).transpose(axis, 2)
    return x


@form((2, 24, 16), fused=1)
class DecomposedPositions(nn.Module):
    """Rows and columns of an image apart: (q . rel_h) and (q . rel_w) added to the scores viewed apart."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(16, 48)
        self.rel_h, self.rel_w = nn.Parameter(torch.randn(7, 8)), nn.Parameter(torch.randn(11, 8))

    @staticmethod
    def get(size: int, rel: Any) -> Any:
        at = torch.arange(size)[:, None] - torch.arange(size)[None, :] + size - 1
        return rel[at.long()]

    def forward(self, x: Any) -> Any:
        b, n, _ = x.shape
        h, w = 4, 6
        q, k, v = self.qkv(x).reshape(b, n, 3, 2, 8).permute(2, 0, 3, 1, 4).reshape(3, b * 2, n, 8).unbind(0)
        attn = (q * 8**-0.5) @ k.transpose(-2, -1)
        r_q = q.reshape(b * 2, h, w, 8)
        rel_h = einsum("bhwc,hkc->bhwk", r_q, self.get(h, self.rel_h))
        rel_w = einsum("bhwc,wkc->bhwk", r_q, self.get(w, self.rel_w))
        attn = (attn.view(b * 2, h, w, h, w) + rel_h[:, :, :, :, None] + rel_w[:, :, :, None, :]).view(
            b * 2, n, n
        )
        out = (attn.softmax(dim=-1) @ v).view(b, 2, h, w, 8).permute(0, 2, 3, 1, 4)
        return out.reshape(b, h, w, 16)


@form((2, 2, 25, 8), (2, 2, 25, 8), (2, 2, 25, 8), (2, 2, 24, 4), (2, 2, 24, 6))
def positions_beside_a_class_token(q: Any, k: Any, v: Any, rel_h: Any, rel_w: Any) -> Any:
    """Positions for all but the class token, added in place to a slice of the scores."""
    attn = (q * 8**-0.5) @ k.transpose(-2, -1)
    attn[:, :, 1:, 1:] = (
        attn[:, :, 1:, 1:].view(2, 2, 4, 6, 4, 6)
        + rel_h.view(2, 2, 4, 6, 4)[..., :, None]
        + rel_w.view(2, 2, 4, 6, 6)[..., None, :]
    ).view(2, 2, 24, 24)
    return attn.softmax(-1) @ v + q


@form((2, 24, 16), parts=lambda: dict(
    q=nn.Linear(16, 16), kv=nn.Linear(16, 32), sr=nn.Conv2d(16, 16, 2, 2), norm=nn.LayerNorm(16),
))  # fmt: skip
def pooled_keys(net: Any, x: Any) -> Any:
    """Spatial reduction: keys and values of a strided convolution."""
    b, n, c = x.shape
    q = net.q(x).reshape(b, n, 2, 8).permute(0, 2, 1, 3)
    x_ = net.sr(x.permute(0, 2, 1).reshape(b, c, 4, 6)).reshape(b, c, -1).permute(0, 2, 1)
    kv = net.kv(net.norm(x_)).reshape(b, -1, 2, 2, 8).permute(2, 0, 3, 1, 4)
    attn = (q @ kv[0].transpose(-2, -1)) * 8**-0.5
    return (attn.softmax(dim=-1) @ kv[1]).transpose(1, 2).reshape(b, n, c)


@form((2, 48, 4, 6), parts=lambda: dict(bias=nn.Parameter(torch.randn(2, 24, 24))))
def channels_first_heads(net: Any, x: Any) -> Any:
    """(B, heads, dim, N): q transposed, values times transposed weights."""
    b, _, h, w = x.shape
    q, k, v = x.view(b, 2, 24, -1).chunk(3, dim=2)
    attn = (q.transpose(-2, -1) * 8**-0.5) @ k
    attn = (attn + net.bias).softmax(dim=-1)
    return (v @ attn.transpose(-2, -1)).view(b, -1, h, w)


@form((2, 2, 8, 24), (2, 2, 8, 24), (2, 2, 8, 24))
def channel_attention(q: Any, k: Any, v: Any) -> Any:
    """Over channels (transposed attention): a softmax over dim, with a learned temperature."""
    q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
    return ((q @ k.transpose(-2, -1)) * 1.5).softmax(dim=-1) @ v


@form((2, 2, 24, 8), (2, 2, 24, 8), (2, 2, 24, 8), fused=0, reasons=("linear attention",))
def relu_linear_attention(q: Any, k: Any, v: Any) -> Any:
    q, k = F.relu(q), F.relu(k)
    vk = F.pad(v, (0, 1), value=1.0).transpose(-1, -2) @ k
    out = (vk @ q.transpose(-1, -2)).transpose(-1, -2)
    return out[..., :-1] / (out[..., -1:] + 1e-6)


@form((2, 5, 16), (2, 24, 16), (24, 16), fused=3)
class MaskDecoder(nn.Module):
    """Tokens to tokens, tokens to image, image to tokens, positions added to q and k alone."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(linears(16, 16, 16, 16, 16, bias=True) for _ in range(3))
        self.norms = nn.ModuleList(nn.LayerNorm(16) for _ in range(3))

    def attend(self, i: int, q: Any, k: Any, v: Any) -> Any:
        q, k, v = (m(t) for m, t in zip(self.layers[i][:3], (q, k, v), strict=True))
        q, k, v = (t.reshape(t.shape[0], t.shape[1], 2, 8).transpose(1, 2) for t in (q, k, v))
        attn = q @ k.permute(0, 1, 3, 2)
        attn = torch.softmax(attn / math.sqrt(8), dim=-1)
        out = (attn @ v).transpose(1, 2)
        return self.layers[i][3](out.reshape(out.shape[0], out.shape[1], 16))

    def forward(self, queries: Any, keys: Any, pe: Any) -> Any:
        queries = self.norms[0](queries + self.attend(0, queries, queries, queries))
        queries = self.norms[1](queries + self.attend(1, queries, keys + pe, keys))
        keys = self.norms[2](keys + self.attend(2, keys + pe, queries, queries))
        return queries, keys
