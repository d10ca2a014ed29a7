"""Models of other libraries that write attention themselves: what is fused of them, and whether it is right.

    pip install timm diffusers x-transformers vit-pytorch open-clip-torch
    python -m tests.models.libraries --json bench/results/libraries_cpu.json --jobs 2
    python -m tests.models.libraries --only '^x_transformers' --train

Each library is optional: one that cannot be imported is named and left out. Models have random weights and,
where they take sizes, small ones. They run as those of `tests.models.survey` do.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import inspect
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from tests.models import survey

#: What makes a model in evaluation mode, and its inputs by name.
Maker = Callable[[], tuple[nn.Module, dict[str, Any]]]

IMAGE = dict(image_size=32, patch_size=8, num_classes=5, dim=32, depth=2, heads=2, mlp_dim=48)

#: Options of an encoder or decoder of x_transformers.
X_TRANSFORMERS: dict[str, dict[str, Any]] = {
    "plain": {}, "causal": dict(causal=True), "alibi": dict(causal=True, alibi_pos_bias=True),
    "buckets": dict(rel_pos_bias=True), "dynamic positions": dict(dynamic_pos_bias=True),
    "rotary": dict(causal=True, rotary_pos_emb=True), "xpos": dict(causal=True, rotary_xpos=True),
    "qk norm": dict(attn_qk_norm=True),
    "qk norm of dims": dict(attn_qk_norm=True, attn_qk_norm_dim_scale=True),
    "talking heads before": dict(attn_pre_talking_heads=True),
    "talking heads after": dict(attn_post_talking_heads=True), "topk": dict(attn_sparse_topk=3),
    "memories": dict(attn_num_mem_kv=4), "one key head": dict(attn_one_kv_head=True),
    "key heads": dict(attn_kv_heads=2), "zero key": dict(attn_add_zero_kv=True),
    "softclamp": dict(attn_softclamp_logits=True), "residual scores": dict(residual_attn=True),
    "l2 distance": dict(attn_l2_distance=True), "sigmoid": dict(attn_sigmoid=True),
    "selective": dict(causal=True, attn_selective=True), "signed": dict(attn_cog_signed=True),
    "gated values": dict(attn_gate_values=True), "head scale": dict(attn_head_scale=True),
    "past": dict(causal=True, attn_max_attend_past=3), "sinks": dict(attn_head_learned_sink=True),
    "inverted": dict(attn_inverted_attention=True),
    "latent": dict(attn_use_latent_q=True, attn_dim_latent_q=16),
    "laser": dict(causal=True, attn_laser=True), "value residual": dict(add_value_residual=True),
    "flash": dict(causal=True, attn_flash=True), "sandwich": dict(sandwich_norm=True),
    "cope": dict(causal=True, attn_use_cope=True, attn_cope_max_pos=8),
    "data dependent alibi": dict(causal=True, attn_data_dependent_alibi=True),
    "orthogonal values": dict(attn_orthog_projected_values=True),
}  # fmt: skip

#: Module of vit_pytorch -> its class, and what it takes beside or instead of `IMAGE`.
VIT_PYTORCH: dict[str, tuple[str, dict[str, Any]]] = {
    "vit": ("ViT", {}), "simple_vit": ("SimpleViT", {}), "deepvit": ("DeepViT", {}),
    "cait": ("CaiT", dict(cls_depth=1)), "pit": ("PiT", dict(depth=(1, 1))), "rvt": ("RvT", {}),
    "parallel_vit": ("ViT", {}), "vit_for_small_dataset": ("ViT", {}),
    "ats_vit": ("ViT", dict(max_tokens_per_depth=(16, 8))), "xcit": ("XCiT", dict(cls_depth=1)),
    "learnable_memory_vit": ("ViT", {}), "normalized_vit": ("nViT", {}), "vit_with_patch_merger": ("ViT", {}),
    "simple_vit_with_qk_norm": ("SimpleViT", {}), "simple_vit_with_value_residual": ("SimpleViT", {}),
    "simple_vit_with_register_tokens": ("SimpleViT", {}), "simple_uvit": ("SimpleUViT", {}),
    "simple_vit_with_relative_proj_pos_bias": ("SimpleViT", {}), "vit_5": ("ViT", {}),
    "simple_flash_attn_vit": ("SimpleViT", {}), "vit_with_keel_post_ln": ("ViT", {}),
    "simple_vit_with_fft": ("SimpleViT", dict(freq_patch_size=8)),
    "jumbo_vit": ("JumboViT", dict(num_jumbo_cls=1, jumbo_cls_k=2)),
    "levit": ("LeViT", dict(image_size=64, patch_size=None, mlp_dim=None, mlp_mult=2, stages=2, depth=1)),
    "nest": ("NesT", dict(image_size=32, patch_size=4, num_hierarchies=2, block_repeats=(1, 1), mlp_dim=None,
                          depth=None)),
    "max_vit": ("MaxViT", dict(_only=True, num_classes=5, dim=32, depth=(1, 1), window_size=4, dim_head=16)),
    "scalable_vit": ("ScalableViT", dict(_only=True, num_classes=5, dim=16, heads=(1, 2), depth=(1, 1),
                                         reduction_factor=(2, 1), window_size=(4, None), ssa_dim_key=(8, 8),
                                         ssa_dim_value=(8, 8), iwsa_dim_key=(8, 8), iwsa_dim_value=(8, 8))),
    "sep_vit": ("SepViT", dict(_only=True, num_classes=5, dim=16, heads=(1, 2), depth=(1, 1), size=112,
                               dim_head=8)),
    "cct": ("CCT", dict(_only=True, img_size=32, embedding_dim=32, n_conv_layers=1, num_layers=2, num_heads=2,
                        mlp_ratio=1.0, num_classes=5)),
    "regionvit": ("RegionViT", dict(_only=True, dim=(16, 16, 16, 16), depth=(1, 1, 1, 1), window_size=2,
                                    num_classes=5, size=64)),
    "crossformer": ("CrossFormer", dict(_only=True, num_classes=5, dim=(32, 32, 32, 32), depth=(1, 1, 1, 1),
                                        global_window_size=(4, 2, 2, 1), local_window_size=2, size=64)),
    "cvt": ("CvT", dict(_only=True, num_classes=5, s1_emb_dim=16, s2_emb_dim=16, s3_emb_dim=16, s3_depth=1,
                        s2_heads=2, s3_heads=2, s2_depth=1, size=64)),
    "mobile_vit": ("MobileViT", dict(_only=True, image_size=(64, 64), dims=(16, 16, 16), num_classes=5,
                                     channels=(8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8), size=64)),
}  # fmt: skip

#: Modules of timm with attention -> a small model of each.
TIMM = (
    "beit_base_patch16_224 cait_xxs24_224 coat_tiny coatnet_nano_rw_224 convit_tiny crossvit_tiny_240 "
    "davit_tiny deit_tiny_patch16_224 edgenext_xx_small efficientformer_l1 efficientformerv2_s0 "
    "efficientvit_b0 efficientvit_m0 eva02_tiny_patch14_224 fastvit_sa12 focalnet_tiny_srf "
    "gcvit_xxtiny hiera_tiny_224 levit_128s maxvit_pico_rw_256 mvitv2_tiny nest_tiny pit_ti_224 "
    "pvt_v2_b0 repvit_m0_9 samvit_base_patch16_224 sequencer2d_s swin_tiny_patch4_window7_224 "
    "swinv2_tiny_window8_256 swinv2_cr_tiny_224 tiny_vit_5m_224 tnt_s_legacy_patch16_224 "
    "twins_svt_small visformer_tiny vit_tiny_patch16_224 vit_relpos_small_patch16_224 volo_d1_224 "
    "xcit_nano_12_p16_224 mobilevit_xxs mobilevitv2_050 halonet26t botnet26t_256 lambda_resnet26t "
    "mobilenetv4_hybrid_medium nextvit_small rdnet_tiny vitamin_small_224 caformer_s18 shvit_s1 "
    "swiftformer_xs"
).split()

WORD = torch.arange(24).remainder(50).view(2, 12)


def _x_transformers(options: dict[str, Any]) -> tuple[nn.Module, dict[str, Any]]:
    library = importlib.import_module("x_transformers")
    causal = options.get("causal", False)
    layers = (library.Decoder if causal else library.Encoder)(
        dim=32, depth=2, heads=4, attn_dim_head=8, **{k: v for k, v in options.items() if k != "causal"}
    )
    model = library.TransformerWrapper(num_tokens=50, max_seq_len=12, attn_layers=layers)
    return model, {"x": WORD, "mask": torch.arange(12)[None] < torch.tensor([[12], [7]])}


def _vit_pytorch(name: str, kind: str, options: dict[str, Any]) -> tuple[nn.Module, dict[str, Any]]:
    module = importlib.import_module(f"vit_pytorch.{name}")
    own = {} if options.get("_only") else IMAGE
    made = {k: v for k, v in {**own, **options}.items() if v is not None and k not in ("_only", "size")}
    if name == "scalable_vit":
        made["window_size"] = options["window_size"]
    size = options.get("size", made.get("image_size", 32))
    size = size if isinstance(size, int) else size[0]
    model = getattr(module, kind)(**made)
    return model, {next(iter(inspect.signature(model.forward).parameters)): torch.randn(2, 3, size, size)}


def _timm(name: str) -> tuple[nn.Module, dict[str, Any]]:
    model = importlib.import_module("timm").create_model(name, num_classes=5)
    size = model.pretrained_cfg["input_size"]
    return model, {"x": torch.randn(2, *size)}


def _written_out(model: nn.Module) -> nn.Module:
    """A model of diffusers without SDPA, as it is set by those who read its weights."""
    processors = importlib.import_module("diffusers.models.attention_processor")
    for module in model.modules():
        if hasattr(module, "set_processor"):
            module.set_processor(processors.AttnProcessor())
    return model


def _unet(blocks: str, **options: Any) -> tuple[nn.Module, dict[str, Any]]:
    library = importlib.import_module("diffusers")
    model = library.UNet2DConditionModel(
        sample_size=8, block_out_channels=(16, 32), layers_per_block=1, norm_num_groups=4,
        cross_attention_dim=24,
        down_block_types=(blocks, "DownBlock2D"), up_block_types=("UpBlock2D", blocks.replace("Down", "Up")),
        attention_head_dim=8, **options,
    )  # fmt: skip
    states = {"encoder_hidden_states": torch.randn(2, 7, 24)}
    return model, {"sample": torch.randn(2, 4, 8, 8), "timestep": torch.tensor([3, 5]), **states}


class _Mean(nn.Module):
    """An autoencoder that draws no latents."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, sample: Any) -> Any:
        return self.model.decode(self.model.encode(sample).latent_dist.mean).sample


def _autoencoder() -> tuple[nn.Module, dict[str, Any]]:
    library = importlib.import_module("diffusers")
    blocks = dict(down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2)
    model = library.AutoencoderKL(block_out_channels=(8, 16), norm_num_groups=4, sample_size=16, **blocks)
    return _Mean(model), {"sample": torch.randn(2, 3, 16, 16)}


def _dit() -> tuple[nn.Module, dict[str, Any]]:
    library = importlib.import_module("diffusers")
    model = library.DiTTransformer2DModel(
        num_attention_heads=2, attention_head_dim=8, num_layers=2, sample_size=8, num_embeds_ada_norm=10,
        norm_num_groups=4,
    )  # fmt: skip
    inputs = {"timestep": torch.tensor([3, 5]), "class_labels": torch.tensor([1, 2])}
    return model, {"hidden_states": torch.randn(2, 4, 8, 8), **inputs}


def _open_clip(**vision: Any) -> tuple[nn.Module, dict[str, Any]]:
    library = importlib.import_module("open_clip")
    kind = library.model
    model = library.CLIP(
        embed_dim=16,
        vision_cfg=kind.CLIPVisionCfg(
            **{**dict(layers=2, width=32, head_width=16, patch_size=8, image_size=16), **vision}
        ),
        text_cfg=kind.CLIPTextCfg(context_length=12, vocab_size=50, width=32, heads=2, layers=2),
    )  # fmt: skip
    size = vision.get("image_size", 16)
    return model, {"image": torch.randn(2, 3, size, size), "text": WORD}


def _first(made: tuple[nn.Module, dict[str, Any]], change: Any) -> tuple[nn.Module, dict[str, Any]]:
    return change(made[0]), made[1]


def makers() -> Iterator[tuple[str, str, Maker]]:
    """(library, name, what makes it) of each model."""
    for name, options in X_TRANSFORMERS.items():
        yield "x_transformers", name, lambda options=options: _x_transformers(options)
    for name, (kind, options) in VIT_PYTORCH.items():
        yield "vit_pytorch", name, lambda n=name, k=kind, o=options: _vit_pytorch(n, k, o)
    cross = "CrossAttnDownBlock2D"
    diffusers: dict[str, Maker] = {
        "UNet": lambda: _unet(cross), "UNet, written out": lambda: _first(_unet(cross), _written_out),
        "UNet, linear projections": lambda: _first(_unet(cross, use_linear_projection=True), _written_out),
        "UNet, sliced": lambda: _first(_unet(cross), lambda m: m.set_attention_slice(1) or m),
        "autoencoder": _autoencoder, "autoencoder, written out": lambda: _first(_autoencoder(), _written_out),
        "DiT": _dit, "DiT, written out": lambda: _first(_dit(), _written_out),
    }  # fmt: skip
    for name, maker in diffusers.items():
        yield "diffusers", name, maker
    clips: dict[str, dict[str, Any]] = {
        "CLIP": {}, "CLIP, attentional pool": dict(attentional_pool=True, attn_pooler_queries=4,
                                                   attn_pooler_heads=2),
        "CLIP, ResNet": dict(layers=(1, 1, 1, 1), image_size=64, patch_size=None),
        "CLIP, patch dropout": dict(patch_dropout=0.0, no_ln_pre=True),
    }  # fmt: skip
    for name, options in clips.items():
        yield "open_clip", name, lambda options=options: _open_clip(**options)
    for name in TIMM:
        yield "timm", name, lambda name=name: _timm(name)


def row(library: str, name: str, maker: Maker, train: bool) -> dict[str, Any]:
    found = _row(library, name, train)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    try:
        model, inputs = maker()
        with torch.no_grad():
            model.eval()(**inputs)
    except Exception as error:
        return {**found, "state": "not made", "reason": survey.line(error)}
    return {**found, **survey.judged(model, inputs, train)}


def _row(library: str, name: str, train: bool) -> dict[str, Any]:
    key = f"{library} {name}{' train' if train else ''}"
    return {"key": key, "library": library, "name": name, "train": train}


def main(argv: Sequence[str] | None = None) -> int:
    options = survey.parser("libraries", __doc__, "models whose 'library name' matches").parse_args(argv)
    warnings.simplefilter("ignore")
    missing = dict[str, str]()
    wanted: list[tuple[Callable[[], survey.Row], survey.Row]] = []
    for library, name, maker in makers():
        if options.only is not None and not options.only.search(f"{library} {name}"):
            continue
        if library not in missing:
            missing[library] = _missing(library)
            if missing[library]:
                print(f"{library} is left out: {missing[library]}", file=sys.stderr)
        if not missing[library]:
            made = partial(row, library, name, maker, options.train)
            wanted.append((made, _row(library, name, options.train)))
    versions = {library: _version(library) for library in dict.fromkeys(name for name, *_ in makers())}
    return survey.run(wanted, options.jobs, survey.report_in(options.json, "libraries", libraries=versions))


def _version(library: str) -> str:
    """The version that is installed, or ""."""
    for package in (library, f"{library}_torch"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(package)
    return ""


def _declare_boxes() -> None:
    """Make torchvision importable where its compiled operators do not load, as beside another build of torch.

    It registers fakes for two of them, which needs their schemas. No model here calls them.
    """
    try:
        importlib.import_module("torchvision")
    except RuntimeError:
        for name in ("nms", "qnms"):
            torch.library.define(
                f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
            )


def _missing(library: str) -> str:
    """Why a library cannot be imported, or ""."""
    try:
        _declare_boxes()
        importlib.import_module(library)
    except Exception as error:  # one that is installed in part raises whatever it likes
        return survey.line(error)
    return ""


if __name__ == "__main__":
    sys.exit(main())
