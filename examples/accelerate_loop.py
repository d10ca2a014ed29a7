"""A loop of one's own with accelerate, whose dynamo plugin compiles the model."""

import torch
from accelerate import Accelerator
from accelerate.utils import TorchDynamoPlugin
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
        attn_implementation="eager",  # hand-written, as in models that have no other
    )
)
ids = torch.randint(3, 96, (8, 12), generator=torch.Generator().manual_seed(1))

accelerator = Accelerator(
    cpu=not torch.cuda.is_available(), dynamo_plugin=TorchDynamoPlugin(backend="inductor")
)
model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
ids = ids.to(accelerator.device)
for _ in range(3):
    loss = model(input_ids=ids, labels=ids).loss
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    print("loss", loss.item())
print(inductor_fusions.report())
