"""Reads specs in TOML, checks them, and expands them into grids."""
