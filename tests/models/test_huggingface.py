"""Models of Hugging Face, tiny and with random weights: which attentions are fused, and how exactly.

The passes know no architecture by name: the list is of those that write attention in different ways.
"""

from __future__ import annotations

import pytest
import torch

from inductor_fusions import testing
from tests.attention.support import flex_everywhere
from tests.models.zoo import (
    BATCH,
    BOTH,
    DECODER,
    ENCODER,
    GROUPED,
    HEADS,
    LENGTH,
    SHARED,
    SPECIAL,
    TARGET,
    VISION,
    VOCABULARY,
    WIDTH,
    Architecture,
    left_padded,
    pixels,
    seq2seq,
    tokens,
)

pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

T5_LIKE = dict(
    vocab_size=VOCABULARY, d_model=WIDTH, d_kv=8, d_ff=48, num_layers=2, num_decoder_layers=2,
    num_heads=HEADS, decoder_start_token_id=0,
)  # fmt: skip
GPT_LIKE = dict(vocab_size=VOCABULARY, n_positions=32, n_embd=WIDTH, n_layer=2, n_head=HEADS, **SPECIAL)
WAVES = dict(
    hidden_size=WIDTH, num_hidden_layers=2, num_attention_heads=HEADS, intermediate_size=48,
    conv_dim=(16, 16), conv_kernel=(10, 8), conv_stride=(5, 4), num_feat_extract_layers=2,
    num_conv_pos_embeddings=8,
    num_conv_pos_embedding_groups=2, mask_time_prob=0.0, mask_feature_prob=0.0,
)  # fmt: skip


def waves():
    mask = torch.ones(BATCH, 300, dtype=torch.long)
    mask[0, 200:] = 0
    return {"input_values": torch.randn(BATCH, 300), "attention_mask": mask}


def left_padded_ids():
    """Zeros in front are padding."""
    inputs = left_padded()
    return {"input_ids": (inputs["input_ids"] * inputs["attention_mask"]).int()}


def speech():
    ids = torch.randint(3, VOCABULARY, (BATCH, TARGET))
    return {"input_features": torch.randn(BATCH, 20, 16), "decoder_input_ids": ids}


MODELS = {
    # decoders
    "qwen2": Architecture("Qwen2Model", "Qwen2Config", GROUPED, tokens),
    "cohere": Architecture("CohereModel", "CohereConfig", GROUPED, tokens),
    "stablelm": Architecture("StableLmModel", "StableLmConfig", GROUPED, tokens),
    "phi": Architecture("PhiModel", "PhiConfig", GROUPED, tokens),
    "starcoder2": Architecture("Starcoder2Model", "Starcoder2Config", GROUPED, tokens),
    "olmo2": Architecture("Olmo2Model", "Olmo2Config", GROUPED, tokens),
    "granite": Architecture("GraniteModel", "GraniteConfig", GROUPED, tokens),
    "glm": Architecture("GlmModel", "GlmConfig", {**GROUPED, "head_dim": 8}, tokens),
    "deepseek_v3": Architecture(
        "DeepseekV3Model", "DeepseekV3Config",
        dict(
            DECODER, num_key_value_heads=HEADS, first_k_dense_replace=2, n_routed_experts=2, n_group=1,
            topk_group=1, num_experts_per_tok=1, q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=4,
            qk_nope_head_dim=4, v_head_dim=6, moe_intermediate_size=16,
        ),
        tokens,
    ),
    "codegen": Architecture("CodeGenModel", "CodeGenConfig", {**GPT_LIKE, "rotary_dim": 4}, tokens),
    "gpt_bigcode": Architecture("GPTBigCodeModel", "GPTBigCodeConfig", GPT_LIKE, tokens),
    "xglm": Architecture(
        "XGLMModel", "XGLMConfig",
        dict(
            vocab_size=VOCABULARY, d_model=WIDTH, num_layers=2, attention_heads=HEADS, ffn_dim=48,
            max_position_embeddings=32, **SPECIAL,
        ),
        tokens,
    ),
    "biogpt": Architecture("BioGptModel", "BioGptConfig", DECODER, tokens),
    # Its weights are set to 0 where its scores are masked: a padded query is zero.
    "cpmant": Architecture(
        "CpmAntModel", "CpmAntConfig",
        dict(
            vocab_size=VOCABULARY, hidden_size=WIDTH, num_attention_heads=HEADS, dim_head=8, dim_ff=48,
            num_hidden_layers=2, position_bias_num_buckets=8, position_bias_max_distance=16, prompt_types=4,
            prompt_length=2, segment_types=4,
        ),
        left_padded_ids,
    ),
    # encoders
    "xlm_roberta": Architecture("XLMRobertaModel", "XLMRobertaConfig", ENCODER, tokens),
    "modernbert": Architecture(
        "ModernBertModel", "ModernBertConfig",
        {**ENCODER, **SPECIAL, "global_attn_every_n_layers": 2, "local_attention": 6,
         "cls_token_id": 1, "sep_token_id": 2},
        tokens,
    ),
    "esm": Architecture("EsmModel", "EsmConfig", {**ENCODER, "mask_token_id": 4}, tokens),
    "roformer": Architecture("RoFormerModel", "RoFormerConfig", {**ENCODER, "embedding_size": WIDTH}, tokens),
    "squeezebert": Architecture(
        "SqueezeBertModel", "SqueezeBertConfig", {**ENCODER, "embedding_size": WIDTH}, tokens
    ),
    "convbert": Architecture("ConvBertModel", "ConvBertConfig", ENCODER, tokens),
    "funnel": Architecture(
        "FunnelModel", "FunnelConfig",
        dict(vocab_size=VOCABULARY, block_sizes=[1, 1], num_decoder_layers=1, d_model=WIDTH, n_head=HEADS,
             d_head=8, d_inner=48),
        tokens, 3,
    ),
    "xlnet": Architecture(
        "XLNetModel", "XLNetConfig",
        dict(vocab_size=VOCABULARY, d_model=WIDTH, n_layer=2, n_head=HEADS, d_inner=48), tokens,
    ),
    # encoders with decoders
    "pegasus": Architecture("PegasusModel", "PegasusConfig", BOTH, seq2seq, 6),
    "mbart": Architecture("MBartModel", "MBartConfig", BOTH, seq2seq, 6),
    "blenderbot": Architecture("BlenderbotModel", "BlenderbotConfig", BOTH, seq2seq, 6),
    "umt5": Architecture("UMT5Model", "UMT5Config", T5_LIKE, seq2seq, 6),
    "longt5": Architecture("LongT5Model", "LongT5Config", {**T5_LIKE, "local_radius": 3}, seq2seq, 6),
    "led": Architecture(
        "LEDModel", "LEDConfig",
        {**BOTH, "attention_window": 4, "max_encoder_position_embeddings": 32,
         "max_decoder_position_embeddings": 32},
        seq2seq, 4,
    ),
    "speech_to_text": Architecture(
        "Speech2TextModel", "Speech2TextConfig",
        {**{k: v for k, v in BOTH.items() if k != "max_position_embeddings"}, "input_feat_per_channel": 16,
         "conv_channels": 24, "max_source_positions": 64, "max_target_positions": 32, "num_conv_layers": 1,
         "conv_kernel_sizes": (5,)},
        speech, 6,
    ),
    # vision and sound
    "beit": Architecture("BeitModel", "BeitConfig", {**VISION, "use_relative_position_bias": True}, pixels()),
    "dinov2": Architecture("Dinov2Model", "Dinov2Config", {**VISION, "mlp_ratio": 2}, pixels()),
    # Its head is an nn.MultiheadAttention.
    "siglip": Architecture("SiglipVisionModel", "SiglipVisionConfig", VISION, pixels(), sites=3),
    "segformer": Architecture(
        "SegformerModel", "SegformerConfig",
        dict(num_encoder_blocks=2, depths=[1, 1], sr_ratios=[2, 1], hidden_sizes=[16, 32], patch_sizes=[3, 3],
             strides=[2, 2], num_attention_heads=[2, 4], mlp_ratios=[2, 2]),
        pixels(),
    ),
    "hubert": Architecture("HubertModel", "HubertConfig", WAVES, waves),
}  # fmt: skip

#: What is left of an architecture, with the reason. The windows of LED's encoder are no matrix product.
NOT_FUSED = {
    "convbert": "no-product",  # the softmax is one of a convolution's kernel
    "led": "in-between",  # scores are written diagonal by diagonal, into a new tensor
}


def check(architecture: Architecture, model=None, inputs=None, **options) -> testing.Checked:
    wanted = options.pop("fused", architecture.sites)
    model = architecture.build() if model is None else model
    seen = testing.check(
        model, architecture.inputs() if inputs is None else inputs,
        **{"train": False, "backend": testing.EAGER_AFTER_PASSES, "slack": 2.0, "fused": None, **options},
    )  # fmt: skip
    # Where stock misreads permuted operands (XLNet's, torch 2.13), they are written in an equal form too.
    fused = [site for site in seen.ours.fused if site.fusion != "stock_misfires"]
    assert wanted is None or len(fused) == wanted, fused
    return seen


@pytest.mark.parametrize("name", MODELS)
def test_eager(name: str) -> None:
    """Attention written out, and a padded batch."""
    seen = check(MODELS[name])
    left = {site.code for site in seen.sites if site.verdict != "fused"}
    assert left == ({NOT_FUSED[name]} if name in NOT_FUSED else set())


TRAINED = ["qwen2", "cpmant", "xlm_roberta", "umt5", "mbart", "beit"]


@pytest.mark.parametrize("name", TRAINED)
def test_training(name: str) -> None:
    """Every gradient of every parameter, without dropout."""
    check(MODELS[name], train=True, slack=8.0)


@pytest.mark.parametrize("name", ["qwen2", "gpt_bigcode"])
@pytest.mark.parametrize("train", [False, True], ids=["inference", "training"])
def test_left_padding(name: str, train: bool) -> None:
    """Fully masked rows: the outputs of all positions, and all gradients."""
    torch.manual_seed(0)
    check(MODELS[name], inputs=left_padded(), train=train, slack=8.0)


@pytest.mark.parametrize("name", ["qwen2", "xlm_roberta", "umt5", "beit", "deepseek_v3"])
def test_bfloat16(name: str) -> None:
    check(MODELS[name], dtype=torch.bfloat16, slack=1.0)


@pytest.mark.parametrize("name", ["qwen2", "phi", "starcoder2", "olmo2", "codegen", "xglm"])
def test_causal(name: str) -> None:
    """Without a padding mask a decoder is causal, and its mask goes away."""
    inputs = {"input_ids": tokens()["input_ids"]}
    check(MODELS[name], inputs=inputs, kernel="is_causal")


@pytest.mark.parametrize("dynamic", [None, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("name", ["qwen2", "granite", "mbart"])
def test_sdpa(name: str, dynamic: bool | None) -> None:
    """The default path builds a mask although none is given, and repeats keys."""
    architecture = MODELS[name]
    inputs = architecture.inputs()
    del inputs["attention_mask"]
    seen = check(architecture, architecture.build("sdpa"), inputs, fused=None, dynamic=dynamic)
    calls = seen.ours.calls("scaled_dot_product_attention")
    assert len(calls) == architecture.sites
    decoder = [call for call in calls if call.kwargs.get("is_causal")]
    assert len(decoder) == 2
    assert not any(call.kwargs.get("attn_mask") is not None for call in decoder)
    if architecture.options.get("num_key_value_heads") == SHARED:
        assert all(call.kwargs.get("enable_gqa") for call in decoder)


@pytest.mark.parametrize("name", ["qwen2", "xlm_roberta"])
def test_dynamic(name: str) -> None:
    check(MODELS[name], dynamic=True)


@pytest.mark.parametrize("dynamic", [None, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("train", [False, True], ids=["inference", "training"])
def test_softcap(train: bool, dynamic: bool | None) -> None:
    """Gemma-2's cap is an attribute: a symbolic number where sizes are."""
    gemma = Architecture("Gemma2Model", "Gemma2Config", {**GROUPED, "head_dim": 16}, tokens)
    with flex_everywhere("flex"):
        check(gemma, kernel="flex, tanh, block mask: causal", train=train, dynamic=dynamic, slack=8.0)


@pytest.mark.parametrize("train", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("case", ["text", "text and image"])
def test_layoutlmv3(case: str, train: bool) -> None:
    """Its softmax (PB-Relax) is of scores minus their maximum; its biases are learned."""
    options = {
        **ENCODER, "coordinate_size": 6, "shape_size": 4, "input_size": 16, "patch_size": 8,
        "visual_embed": case != "text", "has_relative_attention_bias": True,
        "has_spatial_attention_bias": True, "rel_pos_bins": 8, "rel_2d_pos_bins": 8, **SPECIAL,
    }  # fmt: skip
    low = torch.randint(0, 500, (BATCH, LENGTH, 2))
    inputs = tokens(bbox=torch.cat([low, low + torch.randint(0, 500, (BATCH, LENGTH, 2))], -1))
    if case != "text":
        inputs["pixel_values"] = torch.randn(BATCH, 3, 16, 16)
    layout = Architecture("LayoutLMv3Model", "LayoutLMv3Config", options, lambda: inputs)
    check(layout, train=train, slack=8.0)


def test_checkpointing() -> None:
    """Gradient checkpointing puts each layer into a body of its own."""
    architecture = MODELS["qwen2"]
    model = architecture.build()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    # The same weights; a body that is computed again in the backward would not be computed in double.
    check(architecture, model, train=True, slack=8.0, reference=architecture.build())


def test_weights_are_asked_for() -> None:
    """output_attentions: nothing is fused, with the reason."""
    architecture = MODELS["xlm_roberta"]
    inputs = {**tokens(), "output_attentions": True}
    seen = check(architecture, inputs=inputs, fused=0, reason="weights")
    assert len(seen.sites) == 2


def test_full_compile() -> None:
    """Forward and backward as Inductor compiles them."""
    architecture = MODELS["qwen2"]
    model = architecture.build(num_hidden_layers=1)
    check(architecture, model, left_padded(), fused=1, train=True, backend="inductor", slack=8.0)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
def test_windows_to_both_sides(attention: str, padded: bool) -> None:
    """ModernBERT's layers see all keys, or those of a window: |query - key| below a number."""
    architecture = MODELS["modernbert"]
    inputs = architecture.inputs()
    if not padded:
        del inputs["attention_mask"]
    model = architecture.build(attention, hidden_size=64)
    with flex_everywhere("flex"):
        seen = check(architecture, model, inputs, fused=None)
    whole, window = seen.sites
    assert window.kernel == f"flex, block mask: window{'+pad' if padded else ''}+blocks"
    if padded or attention == "eager":
        assert whole.kernel == ("flex, block mask: pad" if padded else "flex")
    else:
        assert whole.reason == "already an SDPA call without a mask"


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_windows_to_both_sides_or_causal(attention: str) -> None:
    """Gemma 3 as an encoder adds the window to both sides to the causal one."""
    architecture = Architecture(
        "Gemma3TextModel", "Gemma3TextConfig",
        {**GROUPED, "hidden_size": 64, "head_dim": 16, "use_bidirectional_attention": True,
         "sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]},
        tokens,
    )  # fmt: skip
    with flex_everywhere("flex"):
        seen = check(architecture, architecture.build(attention), slack=8.0)
    window, whole = seen.sites
    assert window.kernel == "flex, block mask: window+pad+blocks, enable_gqa"
    assert whole.kernel == "flex, block mask: pad, enable_gqa"


FALCON = Architecture(
    "FalconModel", "FalconConfig",
    {**DECODER, "hidden_size": 64, "alibi": True, "attention_dropout": 0.0, "hidden_dropout": 0.0},
    tokens,
)  # fmt: skip


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("padding", ["none", "right", "left"])
def test_biases_in_a_mask(attention: str, padding: str) -> None:
    """Falcon's ALiBi is filled with the mask, as one tensor of (batch, heads, queries, keys)."""
    inputs = left_padded() if padding == "left" else tokens()
    if padding == "none":
        del inputs["attention_mask"]
    with flex_everywhere("flex"):
        # SDPA on a CPU gets the gradients of fully masked rows wrong.
        seen = check(FALCON, FALCON.build(attention), inputs, train=True, slack=8.0, reference=FALCON.build())
    hidden = "causal" if padding == "none" else "causal+pad"
    assert {site.kernel for site in seen.sites} == {
        f"flex, block mask: {hidden}, bias in score_mod, enable_gqa"
    }
