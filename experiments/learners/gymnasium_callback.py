"""REINFORCE on an environment of Gymnasium that runs in Python, stepped from the program by `jax.pure_callback`.

    python experiments/learners/gymnasium_callback.py

The callback is a pure function: it plays complete episodes of a linear policy from a seed, in a new environment, since
the devices call it concurrently. The lanes of one device call it in turn (`vmap_method="sequential"`).
"""

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxaudit as ja

EPISODES, LONGEST, FEATURES, ACTIONS = 4, 100, 4, 2
OPTIMIZER = optax.adam(0.05)


def play(weights, seed):
    """Plays episodes of a policy `[FEATURES, ACTIONS]`: returns observations, actions and step masks `[E, T, ...]`."""
    env, random = gymnasium.make("CartPole-v1", max_episode_steps=LONGEST), np.random.default_rng(int(seed))
    observations = np.zeros((EPISODES, LONGEST, FEATURES), np.float32)
    actions, mask = np.zeros((EPISODES, LONGEST), np.int32), np.zeros((EPISODES, LONGEST), np.float32)
    for episode in range(EPISODES):
        observation, _ = env.reset(seed=int(random.integers(2**31)))
        for t in range(LONGEST):
            logits = observation @ np.asarray(weights)
            odds = np.exp(np.clip(logits - logits.max(), -50, 0))
            action = int(random.uniform() > odds[0] / odds.sum())
            observations[episode, t], actions[episode, t], mask[episode, t] = observation, action, 1
            observation, _, terminated, truncated, _ = env.step(action)
            if terminated or truncated:
                break
    return observations, actions, mask


SHAPES = (
    jax.ShapeDtypeStruct((EPISODES, LONGEST, FEATURES), jnp.float32),
    jax.ShapeDtypeStruct((EPISODES, LONGEST), jnp.int32),
    jax.ShapeDtypeStruct((EPISODES, LONGEST), jnp.float32),
)


def init(key):
    weights = 0.01 * jax.random.normal(key, (FEATURES, ACTIONS))
    return weights, OPTIMIZER.init(weights)


def step(state, key, taps):
    weights, moments = state
    weights = taps("params", weights)
    seed = jax.random.randint(key, (), 0, 2**31 - 1)
    observations, actions, mask = jax.pure_callback(play, SHAPES, weights, seed, vmap_method="sequential")
    returns = mask.sum(axis=1)  # a reward of 1 in each step
    to_go = jnp.cumsum(mask[:, ::-1], axis=1)[:, ::-1] - returns.mean() / 2

    def loss(weights):
        log_probs = jax.nn.log_softmax(observations @ weights)
        taken = jnp.take_along_axis(log_probs, actions[..., None], axis=-1)[..., 0]
        return -(taken * to_go * mask).sum() / mask.sum()

    value, gradient = jax.value_and_grad(loss)(weights)
    updates, moments = OPTIMIZER.update(taps("gradient", gradient), moments)
    weights = optax.apply_updates(weights, taps("learning_rate", 1.0) * updates)
    return (weights, moments), {"performance": returns.mean(), "loss": value}


def learner() -> ja.Learner:
    """The learner, whose performance is the mean return."""
    return ja.Learner(init, step, "REINFORCE", f"{EPISODES} episodes", "mean return")


if __name__ == "__main__":
    noise = ja.weight_noise(ja.sweep(0.1, 10.0), onset=0.5)
    print(ja.audit(learner(), [noise], seeds=4, steps=60).summary.T.to_string())
