"""Strides and copies that a changed graph owes to what reads it.

`leaving` keeps the strides and the aliasing of outputs, `keeping` copies operands that are saved for a
backward and may be overwritten, and `pinning` fixes the strides of tensors that flex attention captures.
"""
