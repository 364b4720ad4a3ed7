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


def effective_rank_reference(s):
    p = s[s > 0] / s.sum()
    return np.exp(-(p * np.log(p)).sum())


@pytest.mark.parametrize("kind", ["gaussian", "low rank", "decaying", "one direction", "equal", "scaled"])
@pytest.mark.parametrize("shape", [(96, 32), (24, 32)])
def test_singular_values_and_ranks_equal_numpys(kind, shape):
    z = matrices(kind, *shape)
    actual = np.asarray(values(z))
    expected = np.linalg.svd(z.astype(np.float64), compute_uv=False)
    assert (np.abs(actual - expected).max(axis=1) < 1e-6 * expected[:, 0]).all()
    for lane in range(3):
        np.testing.assert_allclose(
            linear_algebra.effective_rank(actual[lane]), effective_rank_reference(expected[lane]), rtol=2e-4
        )
        stable = (expected[lane] ** 2).sum() / expected[lane, 0] ** 2
        np.testing.assert_allclose(linear_algebra.stable_rank(actual[lane]), stable, rtol=1e-5)


def test_small_singular_values_are_not_lost_in_a_square():
    """The smallest is 1e-5 of the largest. From the Gram matrix in float32 it would be noise."""
    rng = np.random.default_rng(0)
    left, right = (np.linalg.qr(rng.normal(size=(n, 32)))[0] for n in (96, 32))
    true = np.geomspace(1.0, 1e-5, 32)
    z = (left * true) @ right.T
    actual = np.asarray(values(np.broadcast_to(z.astype(np.float32), (3, 96, 32))))
    np.testing.assert_allclose(actual[0], true, atol=5e-7)
    assert 0.8e-5 < actual[0, -1] < 1.2e-5


def test_ranks_of_simple_matrices_are_exact():
    rank_one = linear_algebra.singular_values(jnp.outer(jnp.arange(1.0, 7.0), jnp.arange(1.0, 4.0)))
    np.testing.assert_allclose(
        [linear_algebra.effective_rank(rank_one), linear_algebra.stable_rank(rank_one)], 1.0, atol=1e-5
    )
    rank_four = jnp.array([2.0, 2.0, 2.0, 2.0, 0.0])
    np.testing.assert_allclose(
        [linear_algebra.effective_rank(rank_four), linear_algebra.stable_rank(rank_four)], 4.0, rtol=1e-6
    )
    np.testing.assert_allclose(linear_algebra.singular_values(jnp.array([[3.0], [4.0]])), [5.0], rtol=1e-6)
    np.testing.assert_allclose(linear_algebra.singular_values(jnp.array([[3.0, 4.0]])), [5.0], rtol=1e-6)


def test_zeros_and_nonfinite_values_are_handled():
    z = matrices("gaussian", 96, 32)
    z[0], z[1, 4, 2] = 0.0, np.inf
    singular = values(z)
    np.testing.assert_array_equal(singular[0], 0.0)
    np.testing.assert_array_equal(
        [linear_algebra.effective_rank(singular[0]), linear_algebra.stable_rank(singular[0])], 0.0
    )
    np.testing.assert_array_equal(np.isfinite(singular), [[True], [False], [True]] * np.ones((1, 32), bool))
    assert np.isnan([linear_algebra.effective_rank(singular[1]), linear_algebra.stable_rank(singular[1])]).all()


def test_rows_of_zeros_do_not_count():
    z = matrices("gaussian", 96, 32)
    z[:, 24:] = 0
    np.testing.assert_allclose(values(z)[:, :24], values(z[:, :24]), rtol=1e-5)


def test_lapack_is_not_called():
    for function, arguments in ((linear_algebra.singular_values, 1), (linear_algebra.linear_cka, 2)):
        lowered = jax.jit(jax.vmap(function)).lower(*[jnp.zeros((2, 8, 4))] * arguments)
        assert "custom_call" not in lowered.as_text().replace("custom_call @Sharding", "")


def reference_cka(x, y):
    """Computes linear CKA from its definition, by Frobenius products of centred kernels."""
    x, y = (z.astype(np.float64) - z.astype(np.float64).mean(0) for z in (x, y))
    k, l = x @ x.T, y @ y.T
    return (k * l).sum() / np.sqrt((k * k).sum() * (l * l).sum())


def test_cka_equals_its_definition():
    x = matrices("gaussian", 96, 32)
    y = 30 + np.maximum(x[..., ::-1] + x[..., :1], 0)
    actual = cka(x, y)
    np.testing.assert_allclose(actual, [reference_cka(a, b) for a, b in zip(x, y, strict=True)], rtol=1e-5)
    assert 0.1 < np.min(actual) < np.max(actual) < 0.999


def test_cka_is_invariant_to_rotation_scale_and_shift():
    x = matrices("gaussian", 96, 32)
    rotation = np.linalg.qr(np.random.default_rng(0).normal(size=(32, 32)))[0].astype(np.float32)
    np.testing.assert_allclose(cka(x, 1e12 * (x @ rotation) + 2e12), 1.0, atol=1e-5)


def test_cka_of_masked_rows_and_of_constants_is_exact():
    x, y = matrices("gaussian", 96, 32), matrices("decaying", 96, 32)
    mask = np.arange(96) < 40
    y[:, 40:] = np.nan
    actual = jax.vmap(linear_algebra.linear_cka, in_axes=(0, 0, None))(x, y, mask)
    np.testing.assert_allclose(actual, [reference_cka(a[:40], b[:40]) for a, b in zip(x, y, strict=True)], rtol=1e-5)
    np.testing.assert_array_equal(cka(x, np.ones_like(x)), 0.0)
