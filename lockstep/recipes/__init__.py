"""Recipes: the complete description of a run as a value, and as TOML."""
