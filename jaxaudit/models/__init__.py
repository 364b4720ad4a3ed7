"""Networks: Flax Linen modules and the distributions on top of them."""
