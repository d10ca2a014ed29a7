"""Strides and copies that readers of a changed graph rely on.

`leaving` keeps the strides and the aliasing of outputs. `keeping` copies operands that are saved for a
backward and may be overwritten. `pinning` fixes the strides of tensors that flex attention captures.
"""
