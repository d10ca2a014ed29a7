"""The driver: runs the fusions of a stage over a graph, and compiles without a site that raises.

`passes` runs them, on the candidates of `matching`; `changes` and `containment` undo what a rewrite did.
`recovery` and `trials` repeat a compile that raises with fewer sites, `launching` a first call.
"""
