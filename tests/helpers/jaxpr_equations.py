"""Iteration over all equations of a jaxpr."""

from jax.extend.core import jaxprs_in_params


def equations(jaxpr):
    """Yields every equation, including those of inner jaxprs."""
    for equation in jaxpr.eqns:
        yield equation
        for inner in jaxprs_in_params(equation.params):
            yield from equations(inner)
