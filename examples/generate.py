"""Decoding with a static cache: `generate` compiles the step of one token by itself."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.generation import CompileConfig

import inductor_fusions

torch.manual_seed(0)
model = LlamaForCausalLM(
    LlamaConfig(
        vocab_size=96,
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=48,
        max_position_embeddings=32,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
)
prompt = torch.randint(3, 96, (2, 5), generator=torch.Generator().manual_seed(1))

model = model.eval()
# transformers compiles by itself on GPUs alone, unless it is told so; without a GPU nothing is captured.
if torch.cuda.is_available():
    model, prompt = model.cuda().bfloat16(), prompt.cuda()
    model.generation_config.compile_config = CompileConfig(mode="reduce-overhead")
else:
    model.generation_config.compile_config = CompileConfig(mode="default")
    model.generation_config.compile_config._compile_all_devices = True
tokens = model.generate(prompt, max_new_tokens=8, do_sample=False, cache_implementation="static")
print("tokens", *tokens[0, 5:].tolist())
print(inductor_fusions.report())
