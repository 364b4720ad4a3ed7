"""Specs in TOML: a document, read and checked into a grid."""
