"""Judges numbers, and finds the site that makes them wrong.

`runs` calls a function without a trace, `budget` has the errors that are allowed; `verify()` is in
`verifying`, the command `bisect` in `bisecting`.
"""
