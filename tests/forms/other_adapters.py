"""Adapters that are no two products of matrices, or two of a batch of them: they are only reported."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from .linear_form import form

X = (2, 24, 64)
LONG = (2, 48, 64)


@form(X, "frozen 64x64", (64,), left=(1, 1), reasons=("Fourier", "Fourier"))
def circulant(x: Any, w: Any, c: Any) -> Any:
    """C3A: a circulant matrix, whose products are those of spectra."""
    y = torch.fft.irfft(torch.fft.rfft(x.float()) * torch.fft.rfft(c.float()), n=64)
    return F.linear(x, w) + y.to(x.dtype)


@form(X, "frozen 64x64", (4, 4, 16), left=(1, 1), reasons=("Fourier", "Fourier"))
def circulant_blocks(x: Any, w: Any, c: Any) -> Any:
    """PEFT's C3A, by complex transforms of blocks of columns."""
    spectra = torch.fft.ifft(x.float().view(2, 24, 4, 16)), torch.fft.fft(c.float())
    y = torch.fft.fft(torch.einsum("...nb,mnb->...mb", *spectra)).real.reshape(2, 24, 64) / 64
    result = F.linear(x, w)
    result += y.to(x.dtype)
    return result


@form(X, "frozen 64x64", left=(1, 1), silent="lora")
def transforms_beside_a_linear(x: Any, w: Any) -> Any:
    """FNet's mixing multiplies no spectra."""
    return F.linear(x, w) + torch.fft.fft(torch.fft.fft(x.float(), dim=-1), dim=-2).real.to(x.dtype)


@form(X, "frozen 64x64", (64,), left=(1, 1))
def convolution_beside_a_residual(x: Any, w: Any, c: Any) -> Any:
    """As long convolutions add it: no linear is added to it."""
    y = torch.fft.irfft(torch.fft.rfft(x.float()) * torch.fft.rfft(c.float()), n=64)
    return F.linear(x + y.to(x.dtype), w)


@form(X, "frozen 64x64", (16, 16), left=(2, 2), reasons=("MoRA", "MoRA"))
def repeated_elements(x: Any, w: Any, m: Any) -> Any:
    """MoRA, where each number of the narrow result is that of neighbours."""
    narrow = F.linear(x.view(2, 24, 16, 4).sum(-1), m)
    return F.linear(x, w) + narrow.repeat_interleave(4, dim=-1)


@form((24, 64), "frozen 64x64", (5, 8, 64), (5, 64, 8), lambda: torch.arange(24) % 5, left=(1, 1),
      reasons=("limit", "limit"))  # fmt: skip
def adapters_of_each_token(x: Any, w: Any, a: Any, b: Any, which: Any) -> Any:
    """Tokens name their adapters, whose matrices stand on the left."""
    return F.linear(x, w) + torch.bmm(b[which], torch.bmm(a[which], x[:, :, None])).squeeze(-1)


@form(X, "frozen 8x64", "frozen 128x8", "frozen 8x64", "frozen 128x8", left=(1, 1),
      reasons=("multiplied by a tensor, and no base", "only to another adapter"))  # fmt: skip
def gate_of_low_rank(x: Any, a: Any, b: Any, c: Any, d: Any) -> Any:
    """Both linears of a gate are two products of low rank."""
    return torch.tanh(F.linear(F.linear(x, a), b)) * F.linear(F.linear(x, c), d)


@form((2, 24, 16), "frozen 16x16", "frozen 32x16", left=(1, 1), silent="lora")
def mean_of_tokens(x: Any, a: Any, b: Any) -> Any:
    """The gradient of a mean repeats rows of a narrow product, and no columns."""
    return F.linear(x.mean(1), a), F.linear(x, b)


@form((2, 16, 6, 6), (16, 16, 3, 3), (48, 12), (12, 48), left=(1, 1), reasons=("no-matrix", "no-matrix"))
def merged_into_a_convolution(x: Any, w: Any, b: Any, a: Any) -> Any:
    """loralib."""
    return F.conv2d(x, w + (b @ a).view(16, 16, 3, 3) * 0.5, padding=1)


@form((2, 16, 6, 6), (16, 16, 3, 3), (2, 16))
def weight_of_each_sample(x: Any, w: Any, style: Any) -> Any:
    """StyleGAN's modulated convolution is no adapter."""
    weight = (w * style[:, None, :, None, None]).view(32, 16, 3, 3)
    return F.conv2d(x.view(1, 32, 6, 6), weight, padding=1, groups=2)


@form(X, "frozen 64x64", (8, 64), (8, 8), (64, 8), left=(1, 1))
def adapter_with_a_core(x: Any, w: Any, a: Any, core: Any, b: Any) -> Any:
    """FLoRA; nothing is said of an outer product."""
    return F.linear(x, w) + x @ a.t() @ core @ b.t()


@form((3, 24, 64), "frozen 64x64", (3, 64, 8), (3, 8, 64), left=(1, 1), reasons=("limit", "limit"))
def batch_added_by_its_product(x: Any, w: Any, a: Any, b: Any) -> Any:
    return torch.baddbmm(F.linear(x, w), x @ a, b, alpha=2.0)


@form((40, 64), "frozen 64x64", (3, 8, 64), (3, 64, 8), left=(2, 2), reasons=("limit", "limit"))
def batch_on_one_input(x: Any, w: Any, a: Any, b: Any) -> Any:
    """Where a gradient is needed, torch multiplies the rows of all A with the transposed input."""
    return F.linear(x, w) + x @ a.mT @ b.mT


@form(X, "frozen 64x64", (3, 8, 64), (3, 64, 8), left=(2, 2), reasons=("limit", "limit"))
def batch_by_vmap(x: Any, w: Any, a: Any, b: Any) -> Any:
    return torch.vmap(lambda a, b: F.linear(x, w) + x @ a.T @ b.T)(a, b)


@form((40, 64), (40, 64), "frozen 64x64", (3, 8, 64), (3, 64, 8), left=(2, 2), silent="lora")
def batch_beside_a_linear_on_another_input(x: Any, y: Any, w: Any, a: Any, b: Any) -> Any:
    return F.linear(y, w) + x @ a.mT @ b.mT


@form((3, 24, 64), (3, 64, 8), (3, 8, 64))
def batch_added_to_its_input(x: Any, a: Any, b: Any) -> Any:
    """A residual is no base."""
    return torch.baddbmm(x, x @ a, b)


@form(X, "frozen 192x64", (16, 64), (64, 8), (64, 8), left=(1, 1))
def packed_a_of_columns(x: Any, w: Any, a: Any, b: Any, d: Any) -> Any:
    """Two adapters of columns of one linear share a product; the base is in memory."""
    first, second = F.linear(x, a).chunk(2, -1)
    q, k, v = F.linear(x, w).split(64, -1)
    return torch.cat((q + F.linear(first, b), k, v + F.linear(second, d)), -1)


@form(X, "frozen 64x64", "frozen 16x64", "frozen 64x8", left=(0, 0), reasons=("wider rows", "wider rows"))
def part_of_packed_a(x: Any, w: Any, a: Any, b: Any) -> Any:
    """With frozen matrices, torch does not flatten an input whose rows are parts of others."""
    return F.linear(x, w) + F.linear(F.linear(x, a).chunk(2, -1)[0], b)


@form((2, 16, 32), (2, 4, 32), (32, 32), (64, 32), left=(1, 1), silent="lora")
def attention_to_few_tokens(x: Any, context: Any, w: Any, v: Any) -> Any:
    """Where rows may be fully masked, keys get a correction of low rank, which is no adapter."""
    q, (k, v) = F.linear(x, w), F.linear(context, v).chunk(2, -1)
    q, k, v = (t.view(2, -1, 4, 8).transpose(1, 2) for t in (q, k, v))
    seen = torch.ones(16, 4).tril(1)
    mask = seen.masked_fill(seen == 0, float("-inf")).masked_fill(seen == 1, 0.0).to(x.dtype)
    return (q @ k.mT * 8**-0.5 + mask).softmax(-1) @ v


@form((2, 24, 64), "frozen 128x64", "frozen 128x64", "frozen 64x128", left=(2, 2), silent="lora")
def layers_of_low_width(x: Any, gate: Any, up: Any, down: Any) -> Any:
    """From layer to layer, `down` and `up` are two products of low rank, and nothing adds to the second."""
    for _ in range(2):
        h = F.rms_norm(x, (64,))
        x = x + F.linear(F.silu(F.linear(h, gate)) * F.linear(h, up), down)
    return x


#: z of 128 columns, a linear to 64, and the linear behind it, with its adapter.
NARROW_LAYER = ((2, 24, 128), (64, 128), "frozen 64x64", (64,), (8, 64), (64, 8))


@form(*NARROW_LAYER, left=(1, 1), silent="lora")
def adapter_behind_a_narrow_linear(z: Any, v: Any, w: Any, c: Any, a: Any, b: Any) -> Any:
    """The linear in front and the base are no adapter of rank 64: what A reads is the input of a base."""
    h = F.linear(z, v)
    return F.linear(h, w, c) + F.linear(F.linear(h, a), b) * 2.0


@form(*NARROW_LAYER, random=True, silent="lora")
def adapter_with_dropout_behind_a_narrow_mlp(z: Any, v: Any, w: Any, c: Any, a: Any, b: Any) -> Any:
    """The linear in front has a bias and a function behind it."""
    h = F.gelu(F.linear(z, v, c))
    dropped = F.dropout(h, 0.1, torch.is_grad_enabled())
    return F.linear(h, w) + F.linear(F.linear(dropped, a), b) * 2.0


@form((2, 24, 128), (64, 128), "frozen 128x64", (8, 64), left=(1, 1), reasons=("no-base", "no-base"))
def narrow_linears_beside_a_router(z: Any, v: Any, w: Any, router: Any) -> Any:
    """What reads the narrow result as well is not the first product of an adapter."""
    h = F.linear(z, v)
    return F.linear(h, w), F.linear(h, router).softmax(-1)


@form((2, 24, 128), "frozen 64x128", (16, 128), (64, 16), (4, 16), left=(1, 1))
def adapter_whose_narrow_result_is_routed(x: Any, w: Any, a: Any, b: Any, router: Any) -> Any:
    """Fewer columns are computed of what A gives, and A and B are an adapter all the same."""
    h = F.linear(x, a)
    return F.linear(x, w) + F.linear(h, b) * F.linear(h, router).softmax(-1)[..., :1]


@form(LONG, "frozen 128x64", (3, 64, 8), (3, 8, 128), (3,), lambda: torch.tensor([2, 0]), left=(1, 1),
      reasons=("limit", "limit"))  # fmt: skip
def scaled_adapters_by_number(x: Any, w: Any, a: Any, b: Any, scales: Any, which: Any) -> Any:
    """S-LoRA, where each adapter has a scale of its own."""
    return F.linear(x, w) + (x @ a[which] @ b[which]) * scales[which][:, None, None]


@form(LONG, "frozen 128x64", (3, 64, 8), (3, 8, 128), (3, 64), left=(1, 1), reasons=("", "multiple of 8"))
def mixture_by_one_einsum(x: Any, w: Any, a: Any, b: Any, gate: Any) -> Any:
    """The gates multiply the ranks, between two products of all experts; einsum moves dims of size 1."""
    gates, narrow = F.linear(x, gate).softmax(-1), torch.einsum("bsd,edr->bser", x, a)
    return F.linear(x, w) + torch.einsum("bse,bser,erd->bsd", gates, narrow, b)


@form(
    LONG, "frozen 64x64", (8, 64), (64, 8), (1, 64), left=(1, 1), reasons=("passes through torch.where", "")
)
def gated_adapter_behind_where(x: Any, w: Any, a: Any, b: Any, gate: Any) -> Any:
    """The gate is supported; what is behind it is not."""
    gates = F.linear(x, gate).sigmoid()
    return F.linear(x, w) + torch.where(gates > 0.5, F.linear(F.linear(x, a), b) * gates, 0.0)


@form(LONG, "frozen 64x64", (8, 64), (8,), (64, 8), (64,), (1,), left=(0, 1), reasons=("", "used-elsewhere"))
def parallel_adapter_with_a_trained_scale(x: Any, w: Any, a: Any, c: Any, b: Any, d: Any, scale: Any) -> Any:
    """He et al.: its result is saved for the gradient of the scale."""
    return F.linear(x, w) + F.linear(F.relu(F.linear(x, a, c)), b, d) * scale


@form("frozen 24x64", "frozen 64x64", (8, 64), (8, 8), (64, 8), left=(1, 1), silent="lora")
def core_between_a_and_b_of_a_fixed_input(x: Any, w: Any, a: Any, core: Any, b: Any) -> Any:
    """In the backward, the product with a square matrix is none of low rank."""
    return F.linear(x, w) + F.linear(F.linear(F.linear(x, a), core), b)


@form((24, 64), "frozen 64x64", (64, 8), (8, 64), (24, 64), left=(3, 3), reasons=("by a tensor", ""))
def weighted_adapter_that_a_product_is_added_to(x: Any, w: Any, a: Any, b: Any, t: Any) -> Any:
    return torch.addmm(x @ a @ b * t, x, w)


@form(X, "frozen 64x64", (8, 64), (64, 8), reasons=("by a tensor", "used-elsewhere"))
def factor_that_is_computed_of_a_mask(x: Any, w: Any, a: Any, b: Any) -> Any:
    return F.linear(x, w) + F.linear(F.linear(x, a), b) * x.masked_fill(x > 1, 0.5).cos()


@form(X, "frozen 64x64", (8, 64), (8,), (64, 8), (64,), left=(1, 1))
def bottleneck_with_biases(x: Any, w: Any, a: Any, c: Any, b: Any, d: Any) -> Any:
    """Houlsby's, behind a linear."""
    h = F.linear(x, w)
    return h + F.linear(F.gelu(F.linear(h, a, c)), b, d)


@form(X, "frozen 64x64", (8, 64), (8,), (64, 8), (64,), left=(2, 2), silent="lora")
def bottleneck_that_is_added_to_nothing(x: Any, w: Any, a: Any, c: Any, b: Any, d: Any) -> Any:
    return F.linear(F.gelu(F.linear(F.linear(x, w), a, c)), b, d)


@form(X, "frozen 64x64", (8, 64), (8,), (64, 8), left=(1, 1))
def bottleneck_to_which_a_bias_is_added(x: Any, w: Any, a: Any, c: Any, b: Any) -> Any:
    """What is between both products stays as it is."""
    h = F.linear(x, w)
    return h + F.linear(F.gelu(F.linear(h, a) + c), b)


#: A linear on 64 columns, and a matrix for each block of 8 of them.
BLOCKS = (X, "frozen 64x64", (8, 8), (8, 8))


@form(*BLOCKS, left=(3, 3), reasons=("LoKr", "LoKr"))
def kronecker_product_of_two(x: Any, w: Any, c: Any, d: Any) -> Any:
    """LyCORIS without the weight: one matrix mixes the columns of a block, the other one the blocks."""
    inner = F.linear(x.view(2, 24, 8, 8), d)
    return F.linear(x, w) + F.linear(inner.mT, c).mT.reshape(2, 24, 64) * 0.5


@form(*BLOCKS[:3], left=(2, 2), reasons=("MoRA", "MoRA"))
def blocks_in_rotation(x: Any, w: Any, m: Any) -> Any:
    """MoRA, where each block is rotated by its place."""
    h, angle = x.view(2, 24, 8, 8), torch.arange(8.0)[:, None].expand(8, 8)
    turned = h * angle.cos().to(x.dtype) + h.roll(4, -1) * angle.sin().to(x.dtype)
    return F.linear(x, w) + F.linear(turned, m).flatten(2)


@form(X, X, "frozen 64x64", "frozen 8x8", left=(2, 2), silent="lora")
def blocks_of_another_input(x: Any, y: Any, w: Any, m: Any) -> Any:
    """Heads with one matrix for all of them, which read something else."""
    return F.linear(x, w) + F.linear(y.view(2, 24, 8, 8), m).flatten(2)


#: Images, a convolution, and both matrices of an adapter of its channels.
IMAGES = ((2, 16, 6, 6), (16, 16, 3, 3), (4, 16, 1, 1), (16, 4, 1, 1))


@form(*IMAGES, reasons=("belongs to a convolution", "belongs to a convolution"))
def convolution_with_a_bottleneck(x: Any, w: Any, a: Any, b: Any) -> Any:
    """As vision models are adapted: a function is between both."""
    return F.conv2d(x, w, padding=1) + F.conv2d(F.gelu(F.conv2d(x, a)), b) * 0.1


@form(*IMAGES, silent="lora")
def bottleneck_beside_an_image(x: Any, w: Any, a: Any, b: Any) -> Any:
    """Attention of channels reads two convolutions."""
    h = F.conv2d(x, w, padding=1)
    return x + F.conv2d(F.relu(F.conv2d(h, a)) * F.conv2d(x, a), b)


@form(LONG, "frozen 128x64", (8, 64), (128, 8), left=(0, 0), reasons=("no-matrix", "no-matrix"))
def convolution_as_b(x: Any, w: Any, a: Any, b: Any) -> Any:
    """loralib's MergedLinear, and litgpt's."""
    narrow = F.linear(x, a).transpose(-2, -1)
    return F.linear(x, w) + F.conv1d(narrow, b.unsqueeze(-1)).transpose(-2, -1) * 0.5


@form(LONG, "frozen 192x64", (16, 64), (128, 8), left=(0, 0), reasons=("no-matrix", "no-matrix"))
def convolution_of_a_with_b(x: Any, w: Any, a: Any, b: Any) -> Any:
    """loralib's MergedLinear merges its groups first, and puts the rows where they belong."""
    rows = F.conv1d(a.unsqueeze(0), b.unsqueeze(-1), groups=2).squeeze(0)
    at = torch.cat([torch.arange(64), torch.arange(128, 192)])
    return F.linear(x, w) + x @ rows.new_zeros(192, 64).index_put((at,), rows).t() * 0.5


@form(LONG, "frozen 128x64", (2, 64, 8), (2, 8, 128), left=(1, 1), reasons=("limit", "limit"))
def adapter_of_each_sample(x: Any, w: Any, a: Any, b: Any) -> Any:
    return F.linear(x, w) + torch.bmm(torch.bmm(x, a), b) * 2.0


@form(LONG, "frozen 128x64", (3, 64, 8), (3, 8, 128), lambda: torch.tensor([2, 0]), left=(1, 1),
      reasons=("limit", "limit"))  # fmt: skip
def adapters_by_number(x: Any, w: Any, a: Any, b: Any, which: Any) -> Any:
    """Samples name their adapters."""
    narrow = torch.einsum("bnd,bdr->bnr", x, a[which])
    return F.linear(x, w) + torch.einsum("bnr,bro->bno", narrow, b[which])


@form(LONG, "frozen 128x64", (2, 32, 8), (2, 8, 64), left=(1, 1), reasons=("limit", "limit"))
def gralora(x: Any, w: Any, a: Any, b: Any) -> Any:
    """Blocks of the input, whose narrow results change places."""
    narrow = torch.einsum("blni,nir->blnr", x.view(2, 48, 2, 32), a)
    turned = narrow.view(2, 48, 2, 2, 4).permute(0, 1, 3, 2, 4).reshape(2, 48, 2, 8)
    return F.linear(x, w) + 2.0 * torch.einsum("bljr,jro->bljo", turned, b).reshape(2, 48, -1)


@form(LONG, "frozen 128x64", (3, 8, 64), (3, 128, 8), (3, 64), left=(1, 1), reasons=("limit", "limit"))
def mixture_by_einsum(x: Any, w: Any, a: Any, b: Any, gate: Any) -> Any:
    weights = F.linear(x, gate).softmax(-1)
    experts = torch.einsum("bser,eor->bseo", torch.einsum("bsd,erd->bser", x, a), b)
    return F.linear(x, w) + torch.einsum("bseo,bse->bso", experts, weights)


@form(LONG, "frozen 128x64", (8, 8, 8), left=(1, 1), reasons=("linear's input", "linear's input"))
def rotated_input(x: Any, w: Any, q: Any) -> Any:
    """OFT: as many columns as a block has are rotated at a time."""
    return F.linear(torch.einsum("...gi,gij->...gj", x.view(2, 48, 8, 8), q - q.mT).reshape(2, 48, 64), w)


@form(LONG, "frozen 128x64", (8, 8, 8), left=(1, 1), reasons=("linear's weight", "linear's weight"))
def rotated_weight(x: Any, w: Any, q: Any) -> Any:
    """OFT on the other operand, as a batch of products."""
    return F.linear(x, torch.einsum("bij,obj->obi", q, w.view(128, 8, 8)).reshape(128, 64))


@form(LONG, "frozen 128x64", (8, 8, 8), (8, 8, 8), left=(1, 1), reasons=("limit", "limit"))
def rotated_twice(x: Any, w: Any, q: Any, r: Any) -> Any:
    """BOFT: the second blocks have one column of each of the first."""
    turned = torch.einsum("...gi,gij->...gj", x.view(2, 48, 8, 8), q).transpose(-1, -2)
    return F.linear(torch.einsum("...gi,gij->...gj", turned, r).reshape(2, 48, 64), w)


@form(
    LONG, "frozen 128x64", (8, 8, 8), "frozen 64x64", left=(5, 5), reasons=("by block_diag", "by block_diag")
)
def rotated_by_one_matrix(x: Any, w: Any, q: Any, p: Any) -> Any:
    """PEFT's BOFT: blocks on the diagonal of a matrix, whose rows and columns are permuted."""
    skew, one = 0.5 * (q - q.mT).float(), torch.eye(8).expand(8, 8, 8)
    turned = torch.linalg.solve(one + skew, one - skew, left=False).to(x.dtype)
    blocks = torch.block_diag(*torch.unbind(turned))[None]
    permuted = torch.bmm(p[None], torch.bmm(blocks, p[None].permute(0, 2, 1)))[0]
    return F.linear(x @ (permuted @ torch.eye(64, dtype=x.dtype)), w)


@form(LONG, "frozen 128x64", "frozen 64x64", (64, 64), left=(3, 3), silent="lora_input")
def product_of_functions_of_matrices(x: Any, w: Any, p: Any, q: Any) -> Any:
    """Neither has blocks."""
    return F.linear(x @ (p.exp() @ q.exp()), w)


@form(LONG, "frozen 128x64", (16, 16), left=(2, 2), reasons=("by matmul", "by matmul"))
def weight_of_blocks(x: Any, w: Any, m: Any) -> Any:
    """PEFT's MiSS "bat": blocks of a copy of the weight are multiplied."""
    copied = w.detach().clone()
    blocks = copied.reshape(8, 16, 4, 16).permute(2, 0, 1, 3)
    return F.linear(x, copied + (blocks @ m + m).permute(1, 2, 0, 3).reshape(128, 64))


@form(LONG, "frozen 128x64", (8, 8), left=(2, 2), reasons=("shapes", "shapes"))
def mora(x: Any, w: Any, m: Any) -> Any:
    return F.linear(x, w) + F.linear(x.view(2, 48, 8, 8).sum(2), m).repeat(1, 1, 16)


@form((4, 48, 64), "frozen 4x64x128", (4, 8, 64), (128, 8, 4), left=(0, 0), reasons=("merged", "merged"))
def adapters_of_experts(x: Any, w: Any, a: Any, b: Any) -> Any:
    """PEFT's ParamWrapper on a parameter of all experts."""
    return torch.bmm(x, w + torch.einsum("ore,eri->eio", b, a) * 2.0)


@form((2, 48, 64), "frozen 64x16", (16, 8), (16, 8), left=(1, 1), silent="lora")
def scores_of_all_pairs(x: Any, w: Any, a: Any, b: Any) -> Any:
    """Graph attention: each of the one score is added to each of the other."""
    h = x @ w
    return ((h @ a)[:, :, None] + (h @ b)[:, None]).relu()


@form((2, 48, 64), "frozen 64x16", (16, 64), (16, 64), left=(1, 1), reasons=("broadcasts", ""))
def features_of_all_pairs(x: Any, w: Any, a: Any, b: Any) -> Any:
    h = x @ w
    return ((h @ a)[:, :, None] + (h @ b)[:, None]).relu()
