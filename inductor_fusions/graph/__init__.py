"""Readers and builders of FX graphs, shared by all fusions.

`torch_ops` reads the operations of Dynamo's graph, in every spelling.
`products` reads views, casts, factors and matrix products of an aten graph; `placement` finds where one
operation can stand for several, and `memory` whether the peak allows it; `facts` holds what is known of a
graph while a fusion works on it, and `builder` adds nodes to it.
"""
