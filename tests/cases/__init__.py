"""Tables of what is compiled, what it means and what becomes of it; `tests/properties` runs over them."""
