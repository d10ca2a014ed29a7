"""One step of a diffusion model of diffusers, whose attention is hand-written (`AttnProcessor`)."""

import torch
from diffusers import UNet2DConditionModel
from diffusers.models.attention_processor import AttnProcessor

import inductor_fusions

torch.manual_seed(0)
unet = UNet2DConditionModel(
    sample_size=8,
    block_out_channels=(32,),
    layers_per_block=1,
    down_block_types=("CrossAttnDownBlock2D",),
    up_block_types=("CrossAttnUpBlock2D",),
    cross_attention_dim=24,
    attention_head_dim=8,
    norm_num_groups=8,
)
unet.set_attn_processor(AttnProcessor())
compiled = torch.compile(unet.eval())
with torch.no_grad():
    noise = compiled(torch.randn(2, 4, 8, 8), torch.tensor([10, 500]), torch.randn(2, 7, 24)).sample
print("noise", noise.std().item())
print(inductor_fusions.report())
