"""What happens in Dynamo's graph beside the computation of values: the graph is not functional.

`writes` says what is overwritten, `inplace` which node a name stands for, and `liveness` who reads a value.
`modes` says what holds at a node (autocast, grad mode, transforms), and `derivatives` which derivatives the
graph takes.
"""
