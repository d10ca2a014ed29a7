"""A vision transformer of timm, in training."""

import timm
import torch

import inductor_fusions

torch.manual_seed(0)
model = timm.create_model(
    "vit_tiny_patch16_224", pretrained=False, img_size=32, patch_size=8, depth=2, num_classes=10
)
for block in model.blocks:
    block.attn.fused_attn = False  # hand-written, as in older versions; by default timm calls SDPA
compiled = torch.compile(model)
images, labels = torch.randn(4, 3, 32, 32), torch.randint(10, (4,))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for _ in range(3):
    loss = torch.nn.functional.cross_entropy(compiled(images), labels)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print("loss", loss.item())
print(inductor_fusions.report())
