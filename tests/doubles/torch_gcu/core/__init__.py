"""``torch_gcu.core``: the names are those of the package."""
