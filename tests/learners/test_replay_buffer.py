"""The replay buffer against a deque, and the squashed Gaussian against numerical integration."""

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


def test_the_ring_holds_what_a_deque_holds(buffer):
    """22 is rounded down to five vector steps of four; after 13 of them, all one program's, it has gone round twice."""
    rng = np.random.default_rng(0)
    assert (buffer.rows, buffer.width, buffer.nbytes) == (20, 10, 800)
    reference = deque(maxlen=20)
    store, write = buffer.init(), jax.jit(chex.assert_max_traces(buffer.write, n=1))
    for count in range(13):
        new = transitions(rng, 4, 3, 2)
        store = write(store, new, count)
        reference.extend(as_rows(new))
        kept = np.asarray(store)[: min(count + 1, 5) * 4]
        assert sorted(map(tuple, kept)) == sorted(map(tuple, reference))
    np.testing.assert_array_equal(store[8:12], as_rows(new))


@pytest.mark.parametrize(("count", "filled"), [(1, 4), (3, 12), (5, 20), (13, 20)])
def test_sampling_is_uniform_over_what_was_written(buffer, count, filled):
    store = jnp.arange(20.0)[:, None] * jnp.ones(10)
    drawn = jax.jit(buffer.sample, static_argnums=2)(store, jax.random.key(count), 20_000, count)
    seen = np.bincount(np.asarray(drawn.reward).astype(int), minlength=20)
    assert (seen[filled:] == 0).all()
    assert stats.chisquare(seen[:filled]).pvalue > 1e-3


def test_what_is_sampled_is_one_transition_in_its_parts(buffer):
    rng = np.random.default_rng(1)
    new = transitions(rng, 4, 3, 2)
    store = buffer.write(buffer.init(), new, 0)
    drawn = buffer.sample(store, jax.random.key(0), 50, 1)
    assert [x.shape for x in drawn] == [(50, 3), (50, 2), (50,), (50, 3), (50,)]
    assert {tuple(row) for row in as_rows(drawn)} == {tuple(row) for row in as_rows(new)}


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_store_of_any_dtype_gives_float32_to_its_precision(dtype):
    buffer = ReplayBuffer(3, 2, 4, 20, dtype)
    new = transitions(np.random.default_rng(2), 4, 3, 2)
    store = buffer.write(buffer.init(), new, 0)
    assert store.dtype == dtype
    assert buffer.nbytes == store.nbytes
    drawn = buffer.sample(store, jax.random.key(0), 200, 1)
    assert all(x.dtype == jnp.float32 for x in drawn)
    order = np.argsort(new.reward)
    nearest = order[np.searchsorted((new.reward[order][1:] + new.reward[order][:-1]) / 2, drawn.reward)]
    np.testing.assert_allclose(as_rows(drawn), as_rows(new)[nearest], rtol=float(jnp.finfo(dtype).eps))


def test_a_lanes_nan_stays_in_its_store(buffer):
    new = jax.tree.map(lambda x: np.stack([x, x * np.nan]), transitions(np.random.default_rng(3), 4, 3, 2))
    stores = jax.vmap(buffer.write, (0, 0, None))(jnp.stack([buffer.init()] * 2), new, 2)
    assert np.isfinite(stores[0]).all()
    assert np.isnan(stores[1, 8:12]).all()
    assert np.isfinite(stores[1, :8]).all()


def test_lanes_are_written_in_place():
    """A loop that writes and samples needs no second store: its work space does not grow with the capacity."""

    def work_space(capacity):
        buffer = ReplayBuffer(3, 2, 4, capacity)

        def step(count, carry):
            stores, total = carry
            new = Transitions(*(jnp.full((4, *shape), count, jnp.float32) for shape in ((3,), (2,), (), (3,), ())))
            stores = jax.vmap(lambda store: buffer.write(store, new, count))(stores)
            drawn = jax.vmap(lambda store: buffer.sample(store, jax.random.key(0), 8, count + 1))(stores)
            return stores, total + drawn.reward.sum()

        run = jax.jit(lambda stores, steps: jax.lax.fori_loop(0, steps, step, (stores, 0.0)), donate_argnums=0)
        lowered = run.lower(jax.ShapeDtypeStruct((2, capacity, buffer.width), jnp.float32), 50)
        return lowered.compile().memory_analysis().temp_size_in_bytes

    assert work_space(40_000) == work_space(400) < 20_000


@pytest.mark.parametrize(("mean", "log_std"), [(0.0, 0.0), (1.2, -1.0), (-0.4, 0.7)])
def test_the_squashed_gaussians_density_integrates_to_its_distribution(mean, log_std):
    """Over all actions to one, and up to an action to the Gaussian's distribution function there."""
    unsquashed = np.linspace(mean - 6 * np.exp(log_std), mean + 6 * np.exp(log_std), 2001)[:, None]
    noise = (unsquashed - mean) / np.exp(log_std)
    like = np.ones_like(unsquashed, np.float32)
    action, log_density = squashed_gaussian(mean * like, log_std * like, noise.astype(np.float32))
    np.testing.assert_allclose(action, np.tanh(unsquashed), atol=1e-6)
    density = np.exp(np.asarray(log_density, np.float64))
    mine = integrate.cumulative_simpson(density / np.cosh(unsquashed[:, 0]) ** 2, x=unsquashed[:, 0])
    assert mine[-1] == pytest.approx(1.0, abs=1e-5)
    np.testing.assert_allclose(mine, stats.norm(mean, np.exp(log_std)).cdf(unsquashed[1:, 0]), atol=1e-5)


def test_the_density_of_several_entries_is_the_product_and_stays_finite_when_saturated():
    noise = jnp.array([[0.3, -1.0, 8.0]])
    mean, log_std = jnp.array([[0.5, 0.0, 30.0]]), jnp.array([[0.1, -20.0, 1.0]])
    action, together = squashed_gaussian(mean, log_std, noise)
    apart = [squashed_gaussian(mean[:, i : i + 1], log_std[:, i : i + 1], noise[:, i : i + 1])[1] for i in range(3)]
    np.testing.assert_allclose(together, sum(apart), rtol=1e-6)
    unsquashed = np.asarray(mean + np.exp(log_std) * noise, np.float64)
    # log(1 - tanh^2 u) = 2 (log 2 - |u|) where the rest has vanished.
    expected = -0.5 * (64 + np.log(2 * np.pi)) - 1.0 - 2 * (np.log(2) - unsquashed[0, 2])
    assert float(apart[2][0]) == pytest.approx(expected, rel=1e-5)
    assert float(action[0, 2]) == 1.0
    gradient = jax.grad(lambda m: squashed_gaussian(m, log_std, noise)[1].sum())(mean)
    assert np.isfinite(gradient).all()
