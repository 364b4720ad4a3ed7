"""The names under which optax's transformations keep their moments."""

FIRST_MOMENT = ("mu", "trace", "momentum")
SECOND_MOMENT = ("nu",)
