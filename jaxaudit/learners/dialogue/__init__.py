"""Reinforcement learning of language models on dialogues: presets of orthogonal parts, each a small file."""
