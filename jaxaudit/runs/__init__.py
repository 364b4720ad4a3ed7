"""Runs that live in a folder: starting, resuming, forking, replaying and exporting them, margins, comparisons."""
