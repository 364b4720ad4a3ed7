"""PPO in the style of purejaxrl: a runner state, a TrainState created in `init`, transitions, and scans.

    python experiments/learners/purejaxrl_ppo.py

The task is to keep a point near the middle of a line. The mean return of an iteration without an episode's end is NaN.
"""

from collections import namedtuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax.training.train_state import TrainState

import jaxaudit as ja

ENVS, STEPS, EPOCHS, MINIBATCHES = 4, 16, 4, 4
GAMMA, LAMBDA, CLIP, LONGEST = 0.99, 0.95, 0.2, 50

Transition = namedtuple("Transition", "observation action log_prob value reward done episode_return")


class ActorCritic(nn.Module):
    @nn.compact
    def __call__(self, x):
        actor, critic = (nn.tanh(nn.Dense(32)(x)) for _ in range(2))
        return nn.Dense(2)(actor), nn.Dense(1)(critic)[..., 0]


def reset(key):
    return jnp.append(jax.random.uniform(key, (2,), minval=-1.0), jnp.zeros(2))  # position, speed, time, return


def env_step(key, env, action):
    position, speed, time, total = env
    speed = jnp.clip(speed + jnp.where(action == 1, 0.1, -0.1), -1, 1)
    env = jnp.array([position + 0.1 * speed, speed, time + 1, total + 1 - jnp.abs(position)])
    done = (jnp.abs(env[0]) > 2) | (env[2] >= LONGEST)
    return jnp.where(done, reset(key), env), 1 - jnp.abs(position), done, jnp.where(done, env[3], jnp.nan)


def init(key):
    network, (params, envs) = ActorCritic(), jax.random.split(key)
    tx = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(2.5e-3, eps=1e-5))
    train_state = TrainState.create(apply_fn=network.apply, params=network.init(params, jnp.zeros(2)), tx=tx)
    return train_state, jax.vmap(reset)(jax.random.split(envs, ENVS))


def step(runner_state, key, taps):
    train_state, env = runner_state
    train_state, apply = train_state.replace(params=taps("params", train_state.params)), train_state.apply_fn

    def rollout(env, key):
        act, move = jax.random.split(key)
        logits, value = apply(train_state.params, env[:, :2])
        action = jax.random.categorical(act, logits)
        log_prob = jax.nn.log_softmax(logits)[jnp.arange(ENVS), action]
        after, *outcome = jax.vmap(env_step)(jax.random.split(move, ENVS), env, action)
        return after, Transition(env[:, :2], action, log_prob, value, *outcome)

    acting, shuffling = jax.random.split(key)
    env, traj_batch = jax.lax.scan(rollout, env, jax.random.split(acting, STEPS))
    _, last_value = apply(train_state.params, env[:, :2])

    def gae(carry, t):
        advantage, next_value = carry
        delta = t.reward + GAMMA * next_value * (1 - t.done) - t.value
        advantage = delta + GAMMA * LAMBDA * (1 - t.done) * advantage
        return (advantage, t.value), advantage

    _, advantages = jax.lax.scan(gae, (jnp.zeros(ENVS), last_value), traj_batch, reverse=True)
    batch = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), (traj_batch, advantages, advantages + traj_batch.value))

    def loss(params, t, advantage, target):
        logits, value = apply(params, t.observation)
        log_probs = jax.nn.log_softmax(logits)
        ratio = jnp.exp(log_probs[jnp.arange(len(t.action)), t.action] - t.log_prob)
        advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
        policy = -jnp.minimum(ratio * advantage, jnp.clip(ratio, 1 - CLIP, 1 + CLIP) * advantage).mean()
        return policy + 0.5 * ((value - target) ** 2).mean() + 0.01 * (jnp.exp(log_probs) * log_probs).sum(-1).mean()

    def update(taps, train_state, rows):
        value, gradient = jax.value_and_grad(loss)(train_state.params, *jax.tree.map(lambda x: x[rows], batch))
        return train_state.apply_gradients(grads=taps("gradient", gradient)), value

    orders = jax.vmap(jax.random.permutation, (0, None))(jax.random.split(shuffling, EPOCHS), ENVS * STEPS)
    train_state, losses = taps.scan(update, train_state, orders.reshape(EPOCHS * MINIBATCHES, -1))
    return (train_state, env), {"performance": jnp.nanmean(traj_batch.episode_return), "loss": losses.mean()}


def learner():
    channels = {"performance": ja.Channel(sparse=True)}
    return ja.Learner(init, step, "purejaxrl PPO", f"{ENVS * STEPS} env steps", "mean return", channels=channels)


if __name__ == "__main__":
    noise = ja.weight_noise(ja.sweep(0.01, 3.0), onset=0.5)
    print(ja.audit(learner(), [noise], seeds=8, steps=200).summary.T.to_string())
