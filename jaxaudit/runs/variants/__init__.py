"""Ways of training compared: how much stability a remedy buys, and what is paid for it."""
