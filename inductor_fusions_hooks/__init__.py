"""What other packages load by themselves: torch's logs and pytest.

A package of its own, because both are loaded in every process of an environment, and importing
`inductor_fusions` would switch the fusions on there.
"""
