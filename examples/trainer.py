"""Hugging Face's Trainer: `torch_compile=True`, and the import."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

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
ids = torch.randint(3, 96, (8, 12), generator=torch.Generator().manual_seed(1))

data = [{"input_ids": row, "labels": row} for row in ids]
arguments = TrainingArguments(
    "out",
    torch_compile=True,
    max_steps=3,
    per_device_train_batch_size=4,
    logging_steps=1,
    report_to=[],
    save_strategy="no",
    disable_tqdm=True,
    use_cpu=not torch.cuda.is_available(),
)
trainer = Trainer(model=model, args=arguments, train_dataset=data)
trainer.train()
for row in trainer.state.log_history:
    if "loss" in row:
        print("loss", row["loss"])
print(inductor_fusions.report())
