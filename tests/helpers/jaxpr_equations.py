"""All equations of a jaxpr."""

from jax.extend.core import jaxprs_in_params


def equations(jaxpr):
    """Yields every equation, those of inner jaxprs too."""
    for equation in jaxpr.eqns:
        yield equation
        for inner in jaxprs_in_params(equation.params):
            yield from equations(inner)
