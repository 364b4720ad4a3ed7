"""Numerical kernels against float64 NumPy references that are written from their definitions."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxaudit.kernels import coherence
from jaxaudit.kernels.gae import gae
from jaxaudit.kernels.linear_algebra import conjugate_gradient, orthogonal
from jaxaudit.kernels.linear_scan import linear_scan
from jaxaudit.kernels.shuffle import shuffled


def reference_gae(rewards, values, next_values, terminated, done, gamma, lam):
    """Computes each advantage as an explicit sum of discounted TD errors up to the episode's end."""
    steps, envs = rewards.shape
    out = np.zeros((steps, envs))
    for n in range(envs):
        for t in range(steps):
            weight = 1.0
            for k in range(t, steps):
                bootstrap = 0.0 if terminated[k, n] else gamma * float(next_values[k, n])
                out[t, n] += weight * (float(rewards[k, n]) + bootstrap - float(values[k, n]))
                if done[k, n] or terminated[k, n]:
                    break
                weight *= gamma * lam
    return out


def rollout(seed, steps=60, envs=5):
    rng = np.random.default_rng(seed)
    rewards, values, next_values = rng.normal(size=(3, steps, envs)).astype(np.float32)
    terminated = rng.random((steps, envs)) < 0.06
    truncated = rng.random((steps, envs)) < 0.06
    return rewards, values, next_values, terminated, terminated | truncated


lanes_gae = jax.jit(jax.vmap(gae, in_axes=(0, 0, 0, 0, 0, None, None)))


@pytest.mark.parametrize(("gamma", "lam"), [(0.99, 0.95), (1.0, 1.0), (0.9, 0.0), (0.0, 0.5)])
def test_gae_equals_the_explicit_sum(gamma, lam):
    batch = [rollout(seed) for seed in range(3)]
    stacked = [np.stack(parts) for parts in zip(*batch, strict=True)]
    advantages = lanes_gae(*stacked, gamma, lam)
    for lane, parts in enumerate(batch):
        np.testing.assert_allclose(advantages[lane], reference_gae(*parts, gamma, lam), rtol=1e-4, atol=1e-5)


def test_gae_with_lambda_one_is_return_minus_value():
    rewards, values, _, _, _ = rollout(1, envs=1)
    terminated = np.zeros((60, 1), bool)
    terminated[-1] = True
    next_values = np.concatenate([values[1:], np.full((1, 1), 99.0, np.float32)])
    returns = sum(0.9**k * np.pad(rewards, ((0, k), (0, 0)))[k:] for k in range(60))
    advantages = jax.jit(gae)(rewards, values, next_values, terminated, terminated, 0.9, 1.0)
    np.testing.assert_allclose(advantages, returns - values, rtol=1e-4, atol=1e-5)


def test_gae_bootstraps_at_truncation_and_not_at_termination():
    ones, nan = np.ones((3, 1, 1), np.float32), np.float32(np.nan)
    next_values = np.array([10, 10, nan], np.float32).reshape(3, 1, 1)
    terminated = np.array([False, True, True]).reshape(3, 1, 1)
    advantages = lanes_gae(ones, 0 * ones, next_values, terminated, ones > 0, 0.5, 0.9)
    np.testing.assert_array_equal(advantages[:, 0, 0], [6, 1, 1])


def test_gae_keeps_a_nan_inside_its_episode():
    rewards, values, next_values, terminated, done = rollout(2)
    terminated[:, :], done[:, :] = False, False
    done[30, 0] = True
    rewards[40, 0] = np.nan
    advantages = np.asarray(jax.jit(gae)(rewards, values, next_values, terminated, done, 0.99, 0.95))
    assert np.isfinite(advantages[:31, 0]).all()
    assert np.isnan(advantages[31:41, 0]).all()
    assert np.isfinite(advantages[41:, 0]).all()
    assert np.isfinite(advantages[:, 1:]).all()


def reference_cosine(g):
    g = np.asarray(g, np.float64)
    k = len(g)
    pairs = [g[i] @ g[j] / np.linalg.norm(g[i]) / np.linalg.norm(g[j]) for i in range(k) for j in range(i)]
    return np.mean(pairs)


def reference_share(g):
    g = np.asarray(g, np.float64)
    units = g / np.linalg.norm(g, axis=1, keepdims=True)
    return np.linalg.svd(units, compute_uv=False)[0] ** 2 / len(g)


def reference_m(g):
    g = np.asarray(g, np.float64)
    return (g.sum(0) ** 2).sum() / (g**2).sum()


def gradients(seed, k=6, shared=1.0):
    rng = np.random.default_rng(seed)
    scale = np.exp(rng.normal(size=(k, 1)))
    return (scale * (shared * rng.normal(size=37) + rng.normal(size=(k, 37)))).astype(np.float32)


def as_tree(g):
    return {"w": g[..., :30].reshape(*g.shape[:-1], 5, 6), "b": (g[..., 30:36], g[..., 36])}


MEASURES = {
    "cosine": (coherence.mean_pairwise_cosine, reference_cosine),
    "share": (coherence.dominant_share, reference_share),
    "m": (coherence.m_coherence, reference_m),
}


@jax.jit
def compute_measures(lanes):
    """Returns all measures of stacks of gradients, `[lanes, K, ...]`."""
    return {name: jax.vmap(measure)(lanes) for name, (measure, _) in MEASURES.items()}


def assert_measures(lanes, expected, **tolerance):
    """Checks all measures of four lanes of six gradients. Any other shape would need another program."""
    for name, values in compute_measures(as_tree(np.stack(lanes))).items():
        expected_values = [MEASURES[name][1](g) for g in expected]
        np.testing.assert_allclose(values, expected_values, err_msg=name, **tolerance)


@pytest.mark.parametrize("shared", [0.0, 0.3, 10.0])
def test_coherence_equals_the_reference(shared):
    lanes = [gradients(seed, shared=shared) for seed in range(4)]
    assert_measures(lanes, lanes, rtol=2e-5, atol=2e-6)


def test_coherence_does_not_depend_on_the_scale():
    g = gradients(0)
    assert_measures([g * np.float32(scale) for scale in (1e-30, 1e-3, 1e3, 1e30)], [g] * 4, rtol=1e-4, atol=0)


def test_sign_flips_change_the_cosine_and_not_the_dominant_share():
    g = gradients(3, shared=3.0)
    flipped = g * np.where(np.arange(6) % 2, 1, -1)[:, None].astype(np.float32)
    measures = compute_measures(as_tree(np.stack([flipped, g, g, g])))
    assert measures["cosine"][0] < 0 < measures["cosine"][1]
    assert float(measures["share"][0]) == pytest.approx(float(measures["share"][1]), rel=1e-5)


def test_coherence_of_equal_and_orthogonal_gradients_has_a_closed_form():
    measures = compute_measures(np.stack([np.ones((4, 4)), np.eye(4)]).astype(np.float32))
    for measure, for_equal, for_orthogonal in (("cosine", 1, 0), ("share", 1, 0.25), ("m", 4, 1)):
        assert list(map(float, measures[measure])) == pytest.approx([for_equal, for_orthogonal], rel=1e-6)


def test_zero_gradients_are_ignored_and_nan_is_propagated():
    g = gradients(1, k=4)
    with_zeros, with_nan, with_infinity = (np.concatenate([g, np.zeros_like(g[:2])]) for _ in range(3))
    with_nan[2, 5], with_infinity[2, 5] = np.nan, np.inf
    measures = compute_measures(as_tree(np.stack([with_zeros, with_nan, np.zeros_like(with_nan), with_infinity])))
    for name, values in measures.items():
        assert float(values[0]) == pytest.approx(MEASURES[name][1](g), rel=1e-5), name
        assert np.isnan(values[1:]).all(), name


@pytest.mark.parametrize("size", [7, 6_400])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("others", [0.0, 1.0])
def test_one_nonfinite_entry_makes_all_measures_nan(size, bad, others):
    """XLA's CPU backend loses a NaN in the maximum of several thousand entries."""
    g = np.full((3, size), others, np.float32)
    g[1, 4] = bad
    for name, (measure, _) in MEASURES.items():
        assert np.isnan(measure({"w": g, "b": np.ones((3, 2), np.float32)})), name
    unit, norm = jax.jit(coherence.unit_gradient)(g[1])
    assert np.isnan(norm)
    assert np.isnan(unit).all()


def test_gram_is_the_matrix_of_products():
    g = gradients(5)
    np.testing.assert_allclose(coherence.gram(as_tree(g)), g.astype(np.float64) @ g.T, rtol=1e-4, atol=1e-4)


@functools.partial(jax.jit, static_argnames="raw")
def running_sum(tree, raw=True):
    first = jax.tree.map(lambda leaf: leaf[0], tree)
    empty = coherence.CoherenceSum.zeros(first, raw=raw)
    return jax.lax.scan(lambda carry, g: (carry.add(g), None), empty, tree)[0]


@pytest.mark.parametrize("zeros", [0, 3])
def test_the_running_sum_equals_the_stack(zeros):
    g = gradients(2, k=6 - zeros)
    stack = np.concatenate([g, np.zeros((zeros, 37), np.float32)])
    carry = running_sum(as_tree(stack))
    assert float(carry.mean_pairwise_cosine()) == pytest.approx(reference_cosine(g), rel=1e-4)
    assert float(carry.m_coherence()) == pytest.approx(reference_m(g), rel=1e-5)
    assert (int(carry.count), int(carry.nonzero)) == (6, 6 - zeros)
    noise = carry.noise_scale(32)
    small = (stack.astype(np.float64) ** 2).sum(1).mean()
    big = (stack.astype(np.float64).mean(0) ** 2).sum()
    expected = reference_noise(small, big, 32, 32 * len(stack))
    np.testing.assert_allclose(noise[:2], expected, rtol=1e-4)


def test_the_running_sum_propagates_nan_and_may_omit_the_raw_sum():
    g = gradients(2)
    without_raw = running_sum(as_tree(g), raw=False)
    assert without_raw.gradient_sum is None
    assert float(without_raw.mean_pairwise_cosine()) == pytest.approx(reference_cosine(g), rel=1e-4)
    with pytest.raises(ValueError, match="raw=False"):
        without_raw.m_coherence()
    g[1, 0] = np.nan
    with_nan = running_sum(as_tree(g))
    assert np.isnan(with_nan.mean_pairwise_cosine())
    assert np.isnan(with_nan.m_coherence())
    assert np.isnan(running_sum(as_tree(g[:1])).mean_pairwise_cosine())
    assert np.isnan(running_sum(as_tree(g[:1] * 0)).mean_pairwise_cosine())


def test_half_precision_gradients_are_summed_in_float32():
    carry = running_sum(as_tree(jnp.asarray(gradients(4), jnp.bfloat16)))
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(carry.unit_sum))
    assert float(carry.mean_pairwise_cosine()) == pytest.approx(reference_cosine(gradients(4)), rel=0.02)


def reference_noise(small, big, b_small, b_big):
    signal = (b_big * big - b_small * small) / (b_big - b_small)
    return signal, (small - big) / (1 / b_small - 1 / b_big)


def test_the_gradient_noise_scale_recovers_known_values():
    rng = np.random.default_rng(0)
    mean = rng.normal(size=50)
    per_sample = mean + 2.0 * rng.normal(size=(400, 64, 50))
    small = (per_sample[:, :8].mean(1) ** 2).sum(-1).mean()
    big = (per_sample.mean(1) ** 2).sum(-1).mean()
    result = coherence.gradient_noise_scale(small, big, 8, 64)
    np.testing.assert_allclose(result[:2], reference_noise(small, big, 8, 64), rtol=1e-5)
    np.testing.assert_allclose(result, ((mean**2).sum(), 200, 200 / (mean**2).sum()), rtol=0.05)


def test_gradient_noise_scale_without_a_signal_is_nan():
    result = coherence.gradient_noise_scale(8.0, 1.0, 1, 8)
    assert result.squared_gradient == 0
    assert np.isnan(result.noise_scale)
    assert np.isnan(coherence.gradient_noise_scale(jnp.nan, 1.0, 1, 8).noise_scale)


@pytest.mark.parametrize(
    "shape",
    [(17, 64), (64, 3), (1, 5), *(pytest.param(shape, marks=pytest.mark.slow) for shape in ((64, 64), (64, 1)))],
)
def test_orthogonal_matrices_are_orthonormal(shape):
    sample = jax.jit(jax.vmap(lambda key: orthogonal(key, shape, 2.0)))
    matrices = np.asarray(sample(jax.random.split(jax.random.key(0), 16)))
    small = matrices if shape[0] <= shape[1] else matrices.transpose(0, 2, 1)
    products = small @ small.transpose(0, 2, 1)
    np.testing.assert_allclose(products, np.broadcast_to(4.0 * np.eye(min(shape)), products.shape), atol=2e-5)


def test_orthogonal_matrices_are_uniform():
    """Entries of a Haar matrix have mean zero, variance 1/n, and no preferred sign on the diagonal."""
    sample = jax.jit(jax.vmap(lambda key: orthogonal(key, (8, 8))))
    matrices = np.asarray(sample(jax.random.split(jax.random.key(1), 4000)))
    assert np.abs(matrices.mean(0)).max() < 5 * np.sqrt(1 / 8 / 4000)
    np.testing.assert_allclose((matrices**2).mean(0), 1 / 8, atol=0.02)


@pytest.mark.parametrize("n", [1, pytest.param(2, marks=pytest.mark.slow), 7, 2048])
def test_a_shuffle_is_a_permutation(n):
    orders = np.asarray(jax.jit(jax.vmap(lambda key: shuffled(key, n)))(jax.random.split(jax.random.key(0), 20)))
    np.testing.assert_array_equal(np.sort(orders, axis=1), np.broadcast_to(np.arange(n), orders.shape))


def test_shuffles_are_uniform():
    """Each of the 24 orders of four elements is equally frequent (chi-squared, 23 degrees of freedom, p > 0.001)."""
    orders = np.asarray(jax.jit(jax.vmap(lambda key: shuffled(key, 4)))(jax.random.split(jax.random.key(1), 24_000)))
    _, counts = np.unique(orders, axis=0, return_counts=True)
    assert counts.size == 24
    assert ((counts - 1000) ** 2 / 1000).sum() < 49.7


def test_the_largest_eigenvalue_matches_numpy():
    rng = np.random.default_rng(5)
    matrices = []
    for spread in (0.0, 0.1, 1.0, 10.0):
        vectors = rng.normal(size=(32, 50)) + spread * rng.normal(size=50)
        vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
        matrices.append(vectors @ vectors.T)
    matrices += [np.eye(32), np.diag(np.r_[1.0, 1.0 - 1e-6, np.zeros(30)])]
    stack = np.array(matrices, np.float32)
    eigenvalues = jax.jit(jax.vmap(coherence.largest_eigenvalue))(stack)
    np.testing.assert_allclose(eigenvalues, np.linalg.eigvalsh(stack.astype(np.float64))[:, -1], rtol=2e-6)


def definite_system(seed, n, condition):
    """Returns a symmetric positive definite matrix with a known condition number, and a right-hand side."""
    rng = np.random.default_rng(seed)
    vectors = np.linalg.qr(rng.normal(size=(n, n)))[0]
    matrix = (vectors * np.geomspace(1.0, 1.0 / condition, n)) @ vectors.T
    return matrix.astype(np.float32), rng.normal(size=n).astype(np.float32)


def test_conjugate_gradients_solve_the_system():
    systems = [definite_system(seed, 37, condition) for condition in (1.0, 30.0) for seed in range(4)]
    matrices, sides = map(np.stack, zip(*systems, strict=True))
    solve = jax.vmap(lambda a, b: conjugate_gradient(lambda v: a @ v, b, steps=60))
    expected = np.linalg.solve(matrices.astype(np.float64), sides[..., None])[..., 0]
    error = np.linalg.norm(jax.jit(solve)(matrices, sides) - expected, axis=-1)
    assert (error < 1e-5 * np.linalg.norm(expected, axis=-1)).all()


def test_conjugate_gradients_converge_within_the_textbook_bound():
    """After k steps, the error's A-norm is at most 2 ((sqrt(c) - 1) / (sqrt(c) + 1))^k of the first.

    k is not static.
    """
    matrix, side = definite_system(0, 37, 30.0)
    exact = np.linalg.solve(matrix.astype(np.float64), side)
    run = chex.assert_max_traces(lambda side, steps: conjugate_gradient(lambda v: matrix @ v, side, steps), n=1)
    solve = jax.jit(run)
    for steps in (1, 5, 15):
        error = np.asarray(solve(side, steps)) - exact
        bound = 2 * ((30**0.5 - 1) / (30**0.5 + 1)) ** steps
        assert (error @ matrix @ error / (exact @ matrix @ exact)) ** 0.5 < bound


def test_conjugate_gradients_accept_trees_and_separate_lanes():
    g = gradients(0, k=3)
    g[1], g[2, 4] = 0.0, np.nan
    solve = jax.jit(jax.vmap(lambda b: conjugate_gradient(lambda v: jax.tree.map(lambda x: 4.0 * x, v), b, steps=5)))
    solved, zero, with_nan = solve(g)
    np.testing.assert_allclose(solved, g[0] / 4, rtol=1e-6)
    assert (np.asarray(zero) == 0).all()
    assert np.isnan(with_nan).all()
    chex.assert_trees_all_close(solve(as_tree(g)), as_tree(solve(g)), rtol=1e-6)


def linear_recurrence(decay, inputs, initial):
    """Computes h_t = a_t h_{t-1} + b_t step by step in double precision."""
    h, out = initial, []
    for a, b in zip(np.broadcast_to(decay, inputs.shape), inputs, strict=True):
        h = a * h + b
        out.append(h)
    return np.array(out)


@pytest.mark.parametrize("method", ["auto", "associative", "sequential"])
@pytest.mark.parametrize("steps", [1, 2, 777, pytest.param(5000, marks=pytest.mark.slow)])
def test_linear_scan_equals_the_recurrence(steps, method):
    random = np.random.default_rng(steps)
    modulus, phase = 1 - np.geomspace(1e-3, 0.9, 6), random.uniform(0, np.pi, 6)
    decay = modulus * np.exp(1j * phase)
    inputs = np.sqrt(1 - modulus**2) * (random.normal(size=(steps, 6)) + 1j * random.normal(size=(steps, 6)))
    initial = random.normal(size=6) + 0j
    scan = jax.jit(functools.partial(linear_scan, method=method))
    states = scan(*(jnp.asarray(x, jnp.complex64) for x in (decay, inputs, initial)))
    rounded = (np.asarray(x, np.complex64).astype(np.complex128) for x in (decay, inputs, initial))
    np.testing.assert_allclose(states, linear_recurrence(*rounded), atol=1e-5)


def test_linear_scan_uses_the_requested_method():
    """ "sequential" is a scan, "associative" has none, and "auto" chooses between the two by the platform."""
    ones = jnp.ones((64, 3))
    for method, expected in (("sequential", {"scan"}), ("associative", set()), ("auto", {"scan", "platform_index"})):
        jaxpr = str(jax.make_jaxpr(functools.partial(linear_scan, method=method))(ones, ones))
        assert {primitive for primitive in ("scan", "platform_index") if f"{primitive}[" in jaxpr} == expected, method


def test_linear_scan_with_a_decay_per_step_can_repeat_the_latest_value():
    random = np.random.default_rng(0)
    observed = (random.random((100, 3)) < 0.3).astype(np.float32)
    values = random.normal(size=(100, 3)).astype(np.float32)
    repeated = jax.jit(linear_scan)(1 - observed, observed * values, np.full(3, 7.0))
    latest = [[max((s for s in range(t + 1) if observed[s, c]), default=-1) for c in range(3)] for t in range(100)]
    expected = [[values[s, c] if s >= 0 else 7.0 for c, s in enumerate(row)] for row in latest]
    np.testing.assert_array_equal(repeated, np.array(expected, np.float32))
