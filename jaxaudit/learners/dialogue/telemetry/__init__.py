"""Channels of learners on dialogues: pure functions of rows' arrays, by what they are about, and the table of names."""
