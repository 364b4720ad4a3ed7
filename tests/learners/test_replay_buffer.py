"""Tests the replay buffer against a deque, and the squashed Gaussian against numerical integration."""

from collections import deque

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import integrate, stats

from jaxaudit.learners.rl.replay_buffer import DTYPES, ReplayBuffer, Transitions
from jaxaudit.learners.rl.sac import squashed_gaussian


def transitions(rng, n, o, a):
    parts = rng.normal(size=(n, o)), rng.normal(size=(n, a)), rng.normal(size=n), rng.normal(size=(n, o))
    return Transitions(*(x.astype(np.float32) for x in parts), (rng.random(n) < 0.5).astype(np.float32))


def as_rows(t):
    return np.concatenate([np.reshape(x, (len(t.reward), -1)) for x in t], axis=1)


@pytest.fixture(scope="module")
def buffer():
    return ReplayBuffer(observation_size=3, action_size=2, num_envs=4, capacity=22)


def test_the_ring_buffer_has_the_contents_of_a_deque(buffer):
    """The capacity 22 is rounded down to five vector steps of four; 13 steps, of one program, wrap around twice."""
    rng = np.random.default_rng(0)
    assert (buffer.rows, buffer.width) == (20, 10)
    reference = deque(maxlen=20)
    store, write = buffer.init(), jax.jit(chex.assert_max_traces(buffer.write, n=1))
    for count in range(13):
        new = transitions(rng, 4, 3, 2)
        store = write(store, new, count)
        reference.extend(as_rows(new))
        stored = np.asarray(store)[: min(count + 1, 5) * 4]
        assert sorted(map(tuple, stored)) == sorted(map(tuple, reference))
    np.testing.assert_array_equal(store[8:12], as_rows(new))


@pytest.mark.parametrize(("count", "filled"), [(1, 4), (3, 12), (5, 20), (13, 20)])
def test_sampling_is_uniform_over_written_rows(buffer, count, filled):
    store = jnp.arange(20.0)[:, None] * jnp.ones(10)
    sample = jax.jit(buffer.sample, static_argnums=2)(store, jax.random.key(count), 20_000, count)
    counts = np.bincount(np.asarray(sample.reward).astype(int), minlength=20)
    assert (counts[filled:] == 0).all()
    assert stats.chisquare(counts[:filled]).pvalue > 1e-3


def test_a_sample_is_a_complete_transition(buffer):
    rng = np.random.default_rng(1)
    new = transitions(rng, 4, 3, 2)
    store = buffer.write(buffer.init(), new, 0)
    sample = buffer.sample(store, jax.random.key(0), 50, 1)
    assert [x.shape for x in sample] == [(50, 3), (50, 2), (50,), (50, 3), (50,)]
    assert {tuple(row) for row in as_rows(sample)} == {tuple(row) for row in as_rows(new)}


@pytest.mark.parametrize("dtype", DTYPES)
def test_samples_are_float32_to_the_precision_of_the_stored_dtype(dtype):
    buffer = ReplayBuffer(3, 2, 4, 20, dtype)
    new = transitions(np.random.default_rng(2), 4, 3, 2)
    store = buffer.write(buffer.init(), new, 0)
    assert store.dtype == dtype
    sample = buffer.sample(store, jax.random.key(0), 200, 1)
    assert all(x.dtype == jnp.float32 for x in sample)
    order = np.argsort(new.reward)
    nearest = order[np.searchsorted((new.reward[order][1:] + new.reward[order][:-1]) / 2, sample.reward)]
    np.testing.assert_allclose(as_rows(sample), as_rows(new)[nearest], rtol=float(jnp.finfo(dtype).eps))


def test_nan_in_one_lane_does_not_reach_another(buffer):
    new = jax.tree.map(lambda x: np.stack([x, x * np.nan]), transitions(np.random.default_rng(3), 4, 3, 2))
    stores = jax.vmap(buffer.write, (0, 0, None))(jnp.stack([buffer.init()] * 2), new, 2)
    assert np.isfinite(stores[0]).all()
    assert np.isnan(stores[1, 8:12]).all()
    assert np.isfinite(stores[1, :8]).all()


def test_writing_is_in_place():
    """The temporary memory of a loop that writes and samples does not grow with the buffer's capacity."""

    def temporary_bytes(capacity):
        buffer = ReplayBuffer(3, 2, 4, capacity)

        def step(count, carry):
            stores, total = carry
            new = Transitions(*(jnp.full((4, *shape), count, jnp.float32) for shape in ((3,), (2,), (), (3,), ())))
            stores = jax.vmap(lambda store: buffer.write(store, new, count))(stores)
            sample = jax.vmap(lambda store: buffer.sample(store, jax.random.key(0), 8, count + 1))(stores)
            return stores, total + sample.reward.sum()

        run = jax.jit(lambda stores, steps: jax.lax.fori_loop(0, steps, step, (stores, 0.0)), donate_argnums=0)
        lowered = run.lower(jax.ShapeDtypeStruct((2, capacity, buffer.width), jnp.float32), 50)
        return lowered.compile().memory_analysis().temp_size_in_bytes

    assert temporary_bytes(40_000) == temporary_bytes(400) < 20_000


@pytest.mark.parametrize(("mean", "log_std"), [(0.0, 0.0), (1.2, -1.0), (-0.4, 0.7)])
def test_the_squashed_density_integrates_to_the_gaussian_cdf(mean, log_std):
    """The density integrates to one over all actions, and to the Gaussian's distribution function up to an action."""
    unsquashed = np.linspace(mean - 6 * np.exp(log_std), mean + 6 * np.exp(log_std), 2001)[:, None]
    noise = (unsquashed - mean) / np.exp(log_std)
    ones = np.ones_like(unsquashed, np.float32)
    action, log_density = squashed_gaussian(mean * ones, log_std * ones, noise.astype(np.float32))
    np.testing.assert_allclose(action, np.tanh(unsquashed), atol=1e-6)
    density = np.exp(np.asarray(log_density, np.float64))
    cdf = integrate.cumulative_simpson(density / np.cosh(unsquashed[:, 0]) ** 2, x=unsquashed[:, 0])
    assert cdf[-1] == pytest.approx(1.0, abs=1e-5)
    np.testing.assert_allclose(cdf, stats.norm(mean, np.exp(log_std)).cdf(unsquashed[1:, 0]), atol=1e-5)


def test_squashed_densities_multiply_and_stay_finite_when_saturated():
    noise = jnp.array([[0.3, -1.0, 8.0]])
    mean, log_std = jnp.array([[0.5, 0.0, 30.0]]), jnp.array([[0.1, -20.0, 1.0]])
    action, joint = squashed_gaussian(mean, log_std, noise)
    single = [squashed_gaussian(mean[:, i : i + 1], log_std[:, i : i + 1], noise[:, i : i + 1])[1] for i in range(3)]
    np.testing.assert_allclose(joint, sum(single), rtol=1e-6)
    unsquashed = np.asarray(mean + np.exp(log_std) * noise, np.float64)
    # log(1 - tanh^2 u) = 2 (log 2 - |u|) when u is so large that other terms vanish.
    expected = -0.5 * (64 + np.log(2 * np.pi)) - 1.0 - 2 * (np.log(2) - unsquashed[0, 2])
    assert float(single[2][0]) == pytest.approx(expected, rel=1e-5)
    assert float(action[0, 2]) == 1.0
    gradient = jax.grad(lambda m: squashed_gaussian(m, log_std, noise)[1].sum())(mean)
    assert np.isfinite(gradient).all()
