"""Attentions as models have them, over a grid of shapes and masks, and each way to compute them."""
