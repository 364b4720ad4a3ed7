"""Singular values, ranks and CKA without LAPACK, against NumPy in float64 and closed forms."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxaudit.kernels import linear_algebra

values = jax.jit(jax.vmap(linear_algebra.singular_values))
cka = jax.jit(jax.vmap(linear_algebra.linear_cka))


def matrices(kind, rows, columns, lanes=3):
    rng = np.random.default_rng(rows)
    z = rng.normal(size=(lanes, rows, columns))
    if kind == "low rank":
        z = rng.normal(size=(lanes, rows, 5)) @ rng.normal(size=(lanes, 5, columns))
    if kind == "decaying":
        z = z * np.exp(-14 * np.arange(columns) / columns)
    if kind == "one direction":
        z = 30 + 0.01 * z
    if kind == "equal":
        z = np.broadcast_to(np.eye(rows, columns), z.shape)
    if kind == "scaled":
        z = z * np.array([1e-20, 1e20, 1.0])[:, None, None]
    return z.astype(np.float32)


def effective(s):
    p = s[s > 0] / s.sum()
    return np.exp(-(p * np.log(p)).sum())


@pytest.mark.parametrize("kind", ["gaussian", "low rank", "decaying", "one direction", "equal", "scaled"])
@pytest.mark.parametrize("shape", [(96, 32), (24, 32)])
def test_singular_values_and_ranks_equal_numpys(kind, shape):
    z = matrices(kind, *shape)
    found = np.asarray(values(z))
    wanted = np.linalg.svd(z.astype(np.float64), compute_uv=False)
    assert (np.abs(found - wanted).max(axis=1) < 1e-6 * wanted[:, 0]).all()
    for lane in range(3):
        np.testing.assert_allclose(linear_algebra.effective_rank(found[lane]), effective(wanted[lane]), rtol=2e-4)
        stable = (wanted[lane] ** 2).sum() / wanted[lane, 0] ** 2
        np.testing.assert_allclose(linear_algebra.stable_rank(found[lane]), stable, rtol=1e-5)


def test_small_singular_values_are_not_lost_in_a_square():
    """A direction of 1e-5 of the largest: from the Gram matrix in float32 its singular value would be noise."""
    rng = np.random.default_rng(0)
    left, right = (np.linalg.qr(rng.normal(size=(n, 32)))[0] for n in (96, 32))
    true = np.geomspace(1.0, 1e-5, 32)
    z = (left * true) @ right.T
    found = np.asarray(values(np.broadcast_to(z.astype(np.float32), (3, 96, 32))))
    np.testing.assert_allclose(found[0], true, atol=5e-7)
    assert 0.8e-5 < found[0, -1] < 1.2e-5


def test_known_ranks():
    one = linear_algebra.singular_values(jnp.outer(jnp.arange(1.0, 7.0), jnp.arange(1.0, 4.0)))
    np.testing.assert_allclose([linear_algebra.effective_rank(one), linear_algebra.stable_rank(one)], 1.0, atol=1e-5)
    four = jnp.array([2.0, 2.0, 2.0, 2.0, 0.0])
    np.testing.assert_allclose([linear_algebra.effective_rank(four), linear_algebra.stable_rank(four)], 4.0, rtol=1e-6)
    np.testing.assert_allclose(linear_algebra.singular_values(jnp.array([[3.0], [4.0]])), [5.0], rtol=1e-6)
    np.testing.assert_allclose(linear_algebra.singular_values(jnp.array([[3.0, 4.0]])), [5.0], rtol=1e-6)


def test_zeros_and_what_is_not_finite():
    z = matrices("gaussian", 96, 32)
    z[0], z[1, 4, 2] = 0.0, np.inf
    found = values(z)
    np.testing.assert_array_equal(found[0], 0.0)
    np.testing.assert_array_equal([linear_algebra.effective_rank(found[0]), linear_algebra.stable_rank(found[0])], 0.0)
    np.testing.assert_array_equal(np.isfinite(found), [[True], [False], [True]] * np.ones((1, 32), bool))
    assert np.isnan([linear_algebra.effective_rank(found[1]), linear_algebra.stable_rank(found[1])]).all()


def test_rows_of_zeros_do_not_count():
    z = matrices("gaussian", 96, 32)
    z[:, 24:] = 0
    np.testing.assert_allclose(values(z)[:, :24], values(z[:, :24]), rtol=1e-5)


def test_nothing_calls_lapack():
    for function, arguments in ((linear_algebra.singular_values, 1), (linear_algebra.linear_cka, 2)):
        lowered = jax.jit(jax.vmap(function)).lower(*[jnp.zeros((2, 8, 4))] * arguments)
        assert "custom_call" not in lowered.as_text().replace("custom_call @Sharding", "")


def reference_cka(x, y):
    """From the definition: Frobenius products of centred kernels."""
    x, y = (z.astype(np.float64) - z.astype(np.float64).mean(0) for z in (x, y))
    k, other = x @ x.T, y @ y.T
    return (k * other).sum() / np.sqrt((k * k).sum() * (other * other).sum())


def test_cka_equals_its_definition():
    x = matrices("gaussian", 96, 32)
    y = 30 + np.maximum(x[..., ::-1] + x[..., :1], 0)
    found = cka(x, y)
    np.testing.assert_allclose(found, [reference_cka(a, b) for a, b in zip(x, y, strict=True)], rtol=1e-5)
    assert 0.1 < np.min(found) < np.max(found) < 0.999


def test_cka_does_not_see_turns_scales_or_shifts():
    x = matrices("gaussian", 96, 32)
    turn = np.linalg.qr(np.random.default_rng(0).normal(size=(32, 32)))[0].astype(np.float32)
    np.testing.assert_allclose(cka(x, 1e12 * (x @ turn) + 2e12), 1.0, atol=1e-5)


def test_cka_of_some_rows_and_of_constants():
    x, y = matrices("gaussian", 96, 32), matrices("decaying", 96, 32)
    there = np.arange(96) < 40
    y[:, 40:] = np.nan
    found = jax.vmap(linear_algebra.linear_cka, in_axes=(0, 0, None))(x, y, there)
    np.testing.assert_allclose(found, [reference_cka(a[:40], b[:40]) for a, b in zip(x, y, strict=True)], rtol=1e-5)
    np.testing.assert_array_equal(cka(x, np.ones_like(x)), 0.0)
