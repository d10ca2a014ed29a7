"""Linears with adapters, over a grid of shapes, and each way to compute them."""
