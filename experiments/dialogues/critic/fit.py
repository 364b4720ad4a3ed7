"""What prevents a value model from explaining returns: pretraining on a frozen warm-started policy, by setting.

    python experiments/dialogues/critic/fit.py OUT.csv CASE SEED [NAME ...]

Rows of the policy are sampled once, and every variant of `VARIANTS` is fitted to them. The result is the explained
variance of 2048 other rows after some numbers of updates. OUT.csv keeps its earlier rows.
"""

from __future__ import annotations

import dataclasses
import pickle
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pandas as pd

sys.path.insert(0, str(Path(__file__).parents[1]))

from critic_bound import Frozen

from jaxaudit.learners.dialogue.network import HEAD
from jaxaudit.learners.dialogue.rollout import Rows
from jaxaudit.learners.dialogue.telemetry.policy import value_statistics

POLICIES = Path("runs/policies")
SPAN = 50
BANK, HELD = 102_400, 2048
EVALUATIONS = (50, 100, 200, 400, 800, 1600, 3200, 6400, 12800, 25600)
STANDARD: dict[str, Any] = {
    "trunk": "policy",
    "rate": 1e-3,
    "rows": 64,
    "updates": 400,
    "bank": 25_600,
    "epsilon": 1e-8,
    "beta2": 0.95,
    "clip": 0.0,
    "bias": 0.0,
    "scale": 1.0,
    "head": 0.0,
    "decay": False,
    "layers": 0,
}
"""The default settings of variants, which are those of the learner."""

SMALL = {"rows": 16, "updates": 3200, "decay": True}
VARIANTS: dict[str, dict[str, Any]] = {
    "64 rows": {"updates": 3200},
    "64 rows, decay": {"updates": 3200, "decay": True},
    "64 rows, rate 3e-3": {"updates": 3200, "rate": 3e-3},
    "64 rows, random trunk": {"updates": 400, "trunk": "random"},
    "256 rows, rate 3e-3": {"updates": 800, "rows": 256, "rate": 3e-3},
    "16 rows, decay": SMALL,
    "16 rows, decay, random trunk": SMALL | {"trunk": "random"},
    "16 rows, decay, rate 3e-3": SMALL | {"rate": 3e-3},
    "16 rows, decay, rate 3e-4": SMALL | {"rate": 3e-4},
    "16 rows, decay, rate 1e-4": SMALL | {"rate": 1e-4},
    "16 rows, decay, epsilon 1e-4": SMALL | {"epsilon": 1e-4},
    "16 rows, decay, epsilon 1e-3": SMALL | {"epsilon": 1e-3},
    "16 rows, decay, epsilon 1e-2, rate 3e-3": SMALL | {"epsilon": 1e-2, "rate": 3e-3},
    "16 rows, decay, gradient clip 0.3": SMALL | {"clip": 0.3},
    "16 rows, decay, random head": SMALL | {"head": 1.0},
    "16 rows, decay, bias at the mean": SMALL | {"bias": "mean"},
    "16 rows, decay, normalised targets": SMALL | {"bias": "mean", "scale": "std"},
    "16 rows, decay to 6400": SMALL | {"updates": 6400},
    "16 rows, decay to 6400, beta2 0.999": SMALL | {"updates": 6400, "beta2": 0.999},
    "16 rows, decay to 6400, rate 2e-3": SMALL | {"updates": 6400, "rate": 2e-3},
    "16 rows, decay to 6400, policy and 2 layers": SMALL | {"updates": 6400, "layers": 4},
    "64 rows, decay to 12800": {"updates": 12800, "decay": True},
    "64 rows, rate 3e-4, decay to 12800": {"updates": 12800, "decay": True, "rate": 3e-4},
    "64 rows, rate 3e-3, decay to 12800": {"updates": 12800, "decay": True, "rate": 3e-3, "bank": BANK},
    "16 rows, decay to 12800": SMALL | {"updates": 12800},
    "16 rows, decay to 25600": SMALL | {"updates": 25600, "bank": BANK},
    "16 rows, decay to 12800, random trunk": SMALL | {"updates": 12800, "trunk": "random"},
}
"""With `decay`, the rate falls linearly to 0 at the last update, so that earlier evaluations are not at its end."""


class Fits:
    """Rows to fit and rows to evaluate, of a case and seed, and the programs of variants."""

    def __init__(self, case: str, seed: int):
        self.frozen = Frozen(case)
        self.critic = self.frozen.learner.critic
        policy_file = POLICIES / f"{case} {seed}.pkl"
        if policy_file.is_file():
            self.policy = pickle.loads(policy_file.read_bytes())
        else:
            self.policy = self.frozen.initial_state(seed).policy.params
            POLICIES.mkdir(parents=True, exist_ok=True)
            policy_file.write_bytes(pickle.dumps(jax.device_get(self.policy)))
        self.bank, self.held = (
            self.frozen.sample(self.policy, jax.random.key(90_000 + 2 * seed + i), n)[0]
            for i, n in enumerate((BANK, HELD))
        )
        last_slot = np.where(self.bank.response_mask, np.arange(self.bank.response_mask.shape[1]), 0).max(1)
        slots = int(np.quantile(last_slot, 0.999)) + 1  # later slots are rarely used and cost time
        self.bank, self.held = (
            jax.tree.map(lambda x: x[:, :slots] if x.ndim == 2 else x, rows) for rows in (self.bank, self.held)
        )
        self.seed = seed

    def _scored(self, params: Any, bias: Any, scale: Any) -> jax.Array:
        values = bias + scale * self.critic.values(params, None, self.held)
        mask, gold = self.held.response_mask, jnp.broadcast_to(self.held.gold[:, None], self.held.response_mask.shape)
        return value_statistics(values, gold, mask)["explained_variance"].value

    def _run(self, params: Any, moments: Any, bank: Rows, key: Any, first: Any, v: Any, rows: int, span: int) -> Any:
        adam = optax.scale_by_adam(0.9, v["beta2"], v["epsilon"])

        def update(carry: Any, number: Any) -> tuple[Any, jax.Array]:
            params, moments = carry
            index = jax.random.randint(jax.random.fold_in(key, number), (rows,), 0, v["bank"].astype(int))
            batch = jax.tree.map(lambda x: x[index], bank)
            target = (batch.gold[:, None] - v["shift"]) / v["scale"]

            def loss(params: Any) -> jax.Array:
                errors = (self.critic.values(params, None, batch) - target) ** 2
                return 0.5 * jnp.sum(jnp.where(batch.response_mask, errors, 0.0)) / jnp.sum(batch.response_mask)

            gradient = jax.grad(loss)(params)
            norm = optax.tree.norm(gradient)
            factor = jnp.where(v["clip"] > 0, jnp.minimum(1.0, v["clip"] / norm), 1.0)
            direction, moments = adam.update(jax.tree.map(lambda g: factor * g, gradient), moments)
            rate = v["rate"] * jnp.where(v["decay"], 1 - number / v["updates"], 1.0)
            return (jax.tree.map(lambda p, d: p - rate * d, params, direction), moments), norm

        (params, moments), norms = jax.lax.scan(update, (params, moments), first + jnp.arange(span))
        return params, moments, jnp.median(norms)

    def fitted(self, **changed: Any):
        """Fits a variant; yields updates, explained variance, median gradient norm and seconds at each evaluation."""
        v = STANDARD | changed
        key = jax.random.key(self.seed)
        self.critic = self.frozen.learner.critic
        if v["layers"]:
            size = dataclasses.replace(self.critic.model.size, depth=v["layers"])
            self.critic = dataclasses.replace(self.critic, model=self.critic.model.clone(size=size))
        self.scored = jax.jit(self._scored)
        self.run = jax.jit(self._run, static_argnames=("rows", "span"))
        if v["trunk"] == "random":
            params = self.critic.init(key)
        elif v["layers"]:  # additional layers begin as the identity
            params = self.critic.with_head(self.policy)
            deeper = self.critic.init(key)["h"]
            added = jax.tree_util.tree_map_with_path(
                lambda path, x: jnp.zeros_like(x) if "c_proj" in jax.tree_util.keystr(path) else x, deeper
            )
            depth = self.frozen.learner.policy.model.size.depth
            joined = jax.tree.map(lambda a, b: jnp.concatenate([a, b[depth:]]), params["h"].layers, added.layers)
            params["h"] = dataclasses.replace(deeper, layers=joined)
        else:
            params = self.critic.with_head(self.policy)
        gold, weight = np.asarray(self.bank.gold), np.asarray(self.bank.response_mask).sum(1)
        mean = np.average(gold, weights=weight)
        std = np.sqrt(np.average((gold - mean) ** 2, weights=weight))
        normal = v["scale"] == "std"
        scale = std if normal else v["scale"]
        shift = mean if normal else 0.0
        width = self.critic.model.size.width
        params[HEAD] = {
            "kernel": v["head"] * jax.random.normal(key, (width,)) / np.sqrt(width),
            "bias": jnp.float32((mean - shift) / scale if v["bias"] == "mean" else 0.0),
        }
        moments = optax.scale_by_adam().init(params)
        numbers = {k: jnp.float32(v[k]) for k in ("rate", "epsilon", "beta2", "clip", "decay", "updates", "bank")}
        numbers |= {"shift": jnp.float32(shift), "scale": jnp.float32(scale)}
        began = time.time()
        for updates in range(0, v["updates"], SPAN):
            params, moments, norm = self.run(
                params, moments, self.bank, key, updates, numbers, rows=v["rows"], span=SPAN
            )
            if (evaluation := updates + SPAN) in EVALUATIONS:
                explained = float(self.scored(params, jnp.float32(shift), jnp.float32(scale)))
                print(evaluation, round(explained, 3), end="  ", flush=True)
                seconds = time.time() - began
                yield {"updates": evaluation, "explained_variance": explained, "norm": float(norm), "seconds": seconds}


def main(out: str, case: str, seed: str, *names: str) -> None:
    """Fits variants, and stores the results after each."""
    path = Path(out)
    results = pd.read_csv(path) if path.is_file() else pd.DataFrame({"case": [], "seed": [], "variant": []})
    missing = [
        name
        for name in names or VARIANTS
        if not ((results.case == case) & (results.seed == int(seed)) & (results.variant == name)).any()
    ]
    if not missing:
        return
    fits = Fits(case, int(seed))
    for name in missing:
        rows = [{"case": case, "seed": int(seed), "variant": name} | row for row in fits.fitted(**VARIANTS[name])]
        print(
            name,
            [(row["updates"], round(row["explained_variance"], 3)) for row in rows],
            f"{rows[-1]['seconds']:.0f} s",
            flush=True,
        )
        results = pd.concat([results, pd.DataFrame(rows)]) if len(results) else pd.DataFrame(rows)
        results.round(4).to_csv(path, index=False)


if __name__ == "__main__":
    main(*sys.argv[1:])
