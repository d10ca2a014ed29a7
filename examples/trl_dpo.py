"""A DPO step as TRL's DPOTrainer takes it: adapters of PEFT, and the model without them as the reference.

It runs without TRL. With TRL, import the package and set `DPOConfig(torch_compile=True)` or
`SFTConfig(torch_compile=True)`: attention and adapters are fused, while TRL 1.x has a head of its own for the
log-probabilities. Here they are plain PyTorch, and fused too.
"""

import torch
from peft import LoraConfig, get_peft_model
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM

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
model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))

# Four prompts of five tokens, each with a chosen completion (the first half of the batch) and a rejected one.
generator = torch.Generator().manual_seed(1)
prompts = torch.randint(3, 96, (4, 5), generator=generator).repeat(2, 1)
ids = torch.cat([prompts, torch.randint(3, 96, (8, 7), generator=generator)], dim=1)
completion_mask = torch.ones_like(ids)
completion_mask[:, :5] = 0


@torch.compile
def log_probabilities(ids, completion_mask):
    logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
    per_token = F.log_softmax(logits, dim=-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
    return (per_token * completion_mask[:, 1:]).sum(dim=1)


optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
for _ in range(3):
    with torch.no_grad(), model.disable_adapter():
        reference = log_probabilities(ids, completion_mask)
    chosen, rejected = (log_probabilities(ids, completion_mask) - reference).chunk(2)
    loss = -F.logsigmoid(0.1 * (chosen - rejected)).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print("loss", loss.item())
print(inductor_fusions.report())
