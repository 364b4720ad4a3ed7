"""Specs: a TOML document, read and checked into a grid."""
