"""Neural networks, as Flax Linen modules, and the distributions and sampling on top of them."""
