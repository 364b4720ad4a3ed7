"""A dialogue with a tool and a second chunk, small enough for a reference in plain loops, and random parameters."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

import jaxaudit as ja
from jaxaudit.dialogues.protocol import NO_TOKEN

CALL, TURN, END, RESULT, BEGIN = range(4, 9)


@dataclass(frozen=True)
class LetterDialogue(ja.Dialogue):
    """Write the letter of the prompt.

    A tool call repeats the letter, and a turn token may begin a chunk that repeats it.
    """

    vocabulary, length, reply_length, prompt_length = 9, 14, 3, 2
    result_tokens, result_error = (0, 1, 2, 3), (RESULT, END)
    prompt_tokens = (0, 1, 2, 3)

    def reset(self, key, difficulty):
        secret, twice = jax.random.randint(key, (2,), 0, 4)
        twice = twice < 2
        prompt = jnp.stack([jnp.int32(BEGIN), secret, jnp.where(twice, secret, NO_TOKEN)])
        state = {name: jnp.int32(0) for name in ("hits", "letters", "turned", "over")}
        return state | {"secret": secret, "left": 2 + twice.astype(jnp.int32)}, self.prompt(prompt)

    def respond(self, state, token):
        is_policy = state["left"] == 0
        call, turn = is_policy & (token == CALL), is_policy & (token == TURN) & (state["turned"] == 0)
        events = {
            "hits": is_policy & (token == state["secret"]),
            "letters": is_policy & (token < 4),
            "turned": turn,
            "over": is_policy & (token == END),
        }
        after = {name: state[name] + more.astype(jnp.int32) for name, more in events.items()}
        after["secret"] = state["secret"]
        after["left"] = jnp.where(call | turn, 2, jnp.maximum(state["left"] - 1, 0))
        with_letter = lambda first: jnp.stack([jnp.int32(first), state["secret"]])  # noqa: E731
        reply = self.choose(turn, self.prompt(with_letter(BEGIN), fresh=True), self.own())
        reply = self.choose(call, self.result(with_letter(RESULT)), reply)
        return after, self.choose(events["over"], self.end(), reply)

    def reward(self, state):
        gold = 0.5 * (state["hits"] > 0) + 0.5 * (state["over"] > 0)
        return {"gold": gold.astype(jnp.float32), "seen": state["letters"].astype(jnp.float32)}

    def demonstration(self, key, difficulty, right):
        state, prompt = self.reset(key, difficulty)
        secret, padding = state["secret"], jnp.int32(NO_TOKEN)
        wrong_letters = jax.random.randint(jax.random.fold_in(key, 1), (2,), 0, 4)
        letters = jax.random.randint(jax.random.fold_in(key, 2), (), 0, 3)
        correct = [jnp.int32(CALL), jnp.int32(RESULT), secret, secret, jnp.int32(END), padding]
        wrong = [
            jnp.int32(TURN),
            jnp.int32(BEGIN),
            secret,
            *(jnp.where(letters > i, wrong_letters[i], padding) for i in range(2)),
        ]
        tokens = jnp.where(right, jnp.stack(correct), jnp.stack([*wrong, jnp.int32(END)]))
        tokens = jnp.concatenate([prompt.tokens, tokens])
        order = jnp.argsort(tokens < 0, stable=True)  # moves all tokens before the padding
        return jnp.pad(tokens[order], (0, self.length - tokens.size), constant_values=NO_TOKEN)


def random_params(network, random, near=None, scale=1.0):
    """Returns parameters of which none is zero or one. With `near`, these are random changes of size `by` to it."""
    shapes = jax.eval_shape(network.init, jax.random.key(0))

    def leaf(path, shape):
        name = path[-1].key
        spread = {"embedding": 0.15, "scale": 0.2, "bias": 0.1, "a": 0.1, "b": 0.1}.get(name, 0.25)
        return np.float32((name == "scale" and near is None) + scale * spread * random.normal(size=shape.shape))

    params = jax.tree_util.tree_map_with_path(leaf, shapes)
    return params if near is None else jax.tree.map(np.add, near, params)
