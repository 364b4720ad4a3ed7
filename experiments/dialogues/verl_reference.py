"""Reference results of verl's functions for one set of rows. Needs torch, numpy, and a checkout of verl (0.8).

    python verl_reference.py VERL OUT.npz

The functions of `verl/trainer/ppo/core_algos.py` are called, with the masked means and the whitening extracted from
`verl/utils/torch_functional.py`. Other imports of these files are replaced by stubs that these functions do not use.

All computations are in float64. OUT has the inputs and the results by name; `.gradient` is with respect to the
log-probabilities or values.
"""

from __future__ import annotations

import ast
import importlib.util
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import torch

PROMPTS, MEMBERS, SLOTS = 3, 4, 9
ROWS = PROMPTS * MEMBERS
MASKED = ("clip_by_value", "masked_sum", "masked_mean", "masked_var", "masked_whiten")


def main() -> None:
    """Writes the reference."""
    torch.set_default_dtype(torch.float64)
    algos = core_algos(Path(sys.argv[1]))
    inputs = draw(np.random.default_rng(1))
    np.savez_compressed(Path(sys.argv[2]), **inputs, **results(algos, {k: torch.tensor(v) for k, v in inputs.items()}))


def core_algos(verl: Path) -> ModuleType:
    """Imports verl's core algorithms, with its masked means and stubs for other imports."""
    functional = ModuleType("verl.utils.torch_functional")
    source = verl / "verl" / "utils" / "torch_functional.py"
    tree = ast.parse(source.read_text())
    tree.body = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name in MASKED]
    functional.torch = torch
    exec(compile(tree, str(source), "exec"), functional.__dict__)
    anything = type("Anything", (), {})
    stubs = {
        "omegaconf": {"DictConfig": anything},
        "verl": {},
        "verl.trainer": {},
        "verl.trainer.config": {"AlgoConfig": anything},
        "verl.utils": {"as_torch_index": None, "group_mean_std": None, "torch_functional": functional},
        "verl.utils.import_utils": {"deprecated": lambda _: lambda function: function},
        "verl.workers": {},
        "verl.workers.config": {"ActorConfig": Config},
    }
    for name, names in stubs.items():
        sys.modules[name] = ModuleType(name)
        vars(sys.modules[name]).update(names)
    sys.modules["verl.utils.torch_functional"] = functional
    spec = importlib.util.spec_from_file_location("core_algos", verl / "verl" / "trainer" / "ppo" / "core_algos.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Config(SimpleNamespace):
    """The configuration of an actor."""

    def get(self, name, default):
        """Returns a setting, or the default."""
        return getattr(self, name, default)


def draw(rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Samples masks, log-probabilities and values, and scores at the end of rows, with tool tokens within rows."""
    mask = rng.random((ROWS, SLOTS)) < 0.6
    mask[:, 0], mask[:, 3] = False, True
    old = -np.abs(rng.normal(1.0, 0.5, (ROWS, SLOTS)))
    value = rng.normal(size=(ROWS, SLOTS))
    score = rng.normal(size=(PROMPTS, MEMBERS))
    score[1] = 0.5
    last_slot = SLOTS - 1 - np.argmax(mask[:, ::-1], 1)
    reward = np.where(np.arange(SLOTS) == last_slot[:, None], score.reshape(-1, 1), 0)
    return {
        "own": mask,
        "old": old,
        "new": old + 0.6 * rng.normal(size=old.shape),
        "reference": old + 0.3 * rng.normal(size=old.shape),
        "advantage": rng.normal(size=old.shape),
        "weight": rng.uniform(0.5, 2.0, old.shape),
        "value": value,
        "new_value": value + 0.4 * rng.normal(size=value.shape),
        "score": score,
        "reward": reward,
    }


def results(algos: ModuleType, x: dict[str, torch.Tensor]) -> dict[str, np.ndarray]:
    """Computes results by name."""
    mask = x["own"].double()
    out = {}
    out["gae"], out["returns"] = algos.compute_gae_advantage_return(x["reward"], x["value"], mask, 0.97, 0.9)
    index = np.repeat(np.arange(PROMPTS), MEMBERS)
    for name, kwargs in {"group": {}, "group_mean": {"norm_adv_by_std_in_grpo": False}}.items():
        out[name] = algos.compute_grpo_outcome_advantage(x["reward"].clone(), mask, index, **kwargs)[0]
    out["leave_one_out"] = algos.compute_rloo_outcome_advantage(x["reward"].clone(), mask, index)[0]
    config = Config(clip_ratio=0.2, clip_ratio_low=0.2, clip_ratio_high=0.28, clip_ratio_c=1.5, global_batch_info={})
    policy = {"dual": (algos.compute_policy_loss_vanilla, config, None)}
    policy["weighted"] = (algos.compute_policy_loss_vanilla, config, x["weight"])
    narrow = Config(clip_ratio=0.2, clip_ratio_low=3e-4, clip_ratio_high=4e-4, global_batch_info={})
    policy["gspo"] = (algos.compute_policy_loss_gspo, narrow, None)
    for name, (function, settings, weight) in policy.items():
        new = x["new"].clone().requires_grad_()
        loss, metrics = function(
            x["old"], new, x["advantage"], mask, "token-mean", config=settings, rollout_is_weights=weight
        )
        loss.backward()
        out |= {f"{name}.loss": loss.detach(), f"{name}.gradient": new.grad}
        out |= {f"{name}.{k.removeprefix('actor/')}": torch.tensor(v) for k, v in metrics.items()}
    for mode in ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm"):
        out[f"aggregation.{mode}"] = algos.agg_loss(x["new"], mask, mode)
    out["aggregation.total"] = algos.agg_loss(x["new"], mask, "token-mean", batch_num_tokens=100)
    value = x["new_value"].clone().requires_grad_()
    loss, fraction = algos.compute_value_loss(value, x["advantage"], x["value"], mask, 0.2)
    loss.backward()
    out |= {"value.loss": loss.detach(), "value.gradient": value.grad, "value.clipped": fraction}
    for kind in ("k1", "k2", "k3"):
        out[kind] = algos.kl_penalty(x["new"], x["reference"], kind)
    out["penalised"] = algos.compute_rewards(x["reward"], x["old"], x["reference"], 0.05)
    return {name: torch.as_tensor(value).numpy() for name, value in out.items()}


if __name__ == "__main__":
    main()
