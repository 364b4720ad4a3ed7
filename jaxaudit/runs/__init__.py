"""Runs that live in a folder: durable execution, resuming, forking, replaying, margins, comparisons."""
