"""Runs in folders: starting, resuming, forking, replaying and exporting them, margins, and comparisons."""
