"""Readers and builders of FX graphs, shared by all fusions.

`torch_ops` reads operations of Dynamo's graph in every form, `products` reads matrix products, views, casts
and factors of an aten graph. `placement` finds where one operation can replace several, and `memory` whether
that raises peak memory. `facts` keeps facts of a graph up to date while a fusion changes it, and `builder`
adds nodes.
"""
