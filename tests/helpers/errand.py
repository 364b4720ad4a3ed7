"""A dialogue with a tool and a second turn, small enough for a reference in plain loops; random parameters."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

import jaxaudit as ja
from jaxaudit.dialogues.protocol import NO_TOKEN

CALL, TURN, END, RESULT, BEGIN = range(4, 9)


@dataclass(frozen=True)
class Errand(ja.Dialogue):
    """Say the letter that is asked for; a call tells it again, and one may turn to a new page that tells it again."""

    vocabulary, length, reply_length, prompt_length = 9, 14, 3, 2
    result_tokens, result_error = (0, 1, 2, 3), (RESULT, END)
    prompt_tokens = (0, 1, 2, 3)

    def reset(self, key, difficulty):
        secret, twice = jax.random.randint(key, (2,), 0, 4)
        twice = twice < 2
        asked = jnp.stack([jnp.int32(BEGIN), secret, jnp.where(twice, secret, NO_TOKEN)])
        state = {name: jnp.int32(0) for name in ("hits", "letters", "turned", "over")}
        return state | {"secret": secret, "left": 2 + twice.astype(jnp.int32)}, self.prompt(asked)

    def respond(self, state, token):
        own = state["left"] == 0
        call, turn = own & (token == CALL), own & (token == TURN) & (state["turned"] == 0)
        said = {
            "hits": own & (token == state["secret"]),
            "letters": own & (token < 4),
            "turned": turn,
            "over": own & (token == END),
        }
        after = {name: state[name] + more.astype(jnp.int32) for name, more in said.items()}
        after["secret"] = state["secret"]
        after["left"] = jnp.where(call | turn, 2, jnp.maximum(state["left"] - 1, 0))
        told = lambda first: jnp.stack([jnp.int32(first), state["secret"]])  # noqa: E731
        reply = self.choose(turn, self.prompt(told(BEGIN), fresh=True), self.own())
        reply = self.choose(call, self.result(told(RESULT)), reply)
        return after, self.choose(said["over"], self.end(), reply)

    def reward(self, state):
        gold = 0.5 * (state["hits"] > 0) + 0.5 * (state["over"] > 0)
        return {"gold": gold.astype(jnp.float32), "seen": state["letters"].astype(jnp.float32)}

    def demonstration(self, key, difficulty, right):
        state, prompt = self.reset(key, difficulty)
        secret, nothing = state["secret"], jnp.int32(NO_TOKEN)
        other = jax.random.randint(jax.random.fold_in(key, 1), (2,), 0, 4)
        said = jax.random.randint(jax.random.fold_in(key, 2), (), 0, 3)
        good = [jnp.int32(CALL), jnp.int32(RESULT), secret, secret, jnp.int32(END), nothing]
        bad = [jnp.int32(TURN), jnp.int32(BEGIN), secret, *(jnp.where(said > i, other[i], nothing) for i in range(2))]
        words = jnp.where(right, jnp.stack(good), jnp.stack([*bad, jnp.int32(END)]))
        words = jnp.concatenate([prompt.tokens, words])
        order = jnp.argsort(words < 0, stable=True)  # what is written, moved together
        return jnp.pad(words[order], (0, self.length - words.size), constant_values=NO_TOKEN)


def random_params(network, random, near=None, by=1.0):
    """Parameters of which none is zero or one; with `near`, those and a little of random ones."""
    shapes = jax.eval_shape(network.init, jax.random.key(0))

    def leaf(path, shape):
        name = path[-1].key
        spread = {"embedding": 0.15, "scale": 0.2, "bias": 0.1, "a": 0.1, "b": 0.1}.get(name, 0.25)
        return np.float32((name == "scale" and near is None) + by * spread * random.normal(size=shape.shape))

    found = jax.tree_util.tree_map_with_path(leaf, shapes)
    return found if near is None else jax.tree.map(np.add, near, found)
