"""Makes the runs of tests/data/run-0.3.tar.gz: PPO with a saved monitor, and once killed halfway; GRPO; SAC.

    python tests/data/run_0_3.py FOLDER             # makes FOLDER/{ppo,killed,grpo,sac}
    python tests/data/run_0_3.py FOLDER --archive   # packs them as tests/data/run-0.3.tar.gz

The archive was made by version 0.3.0. Later versions have to read, report, resume, fork and replay these runs. Replay
is bitwise where hardware and software agree with environment.json. To check that on another machine, run this script
there with version 0.3.0, and replay its folders with the version under test.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import jax
import jax.numpy as jnp

import jaxaudit as ja
from jaxaudit.models import gpt2, gpt2_checkpoint

HEADER = """
[audit]
name = "{name}"
seeds = 2
steps = 8
[metrics]
window = 2
hold = 2
horizon = 2
[run]
chunk = 2
checkpoint_every = 1
"""

PPO_TASK = """
[task]
kind = "registered"
name = "CartPole-v1"
[learner]
kind = "ppo"
"""
PPO = {"num_envs": 2, "rollout_length": 32, "minibatch_size": 32, "hidden": (8,), "epochs": 2, "evaluations": 2}

SPECS = {
    "ppo": HEADER
    + PPO_TASK
    + "\n".join(f"{key} = {list(value) if isinstance(value, tuple) else value}" for key, value in PPO.items())
    + """
[monitor]
file = "clean.npz"
alpha = 0.5
[[remedy]]
kind = "weight_decay"
strength = 0.01
[[perturbation]]
kind = "lr_spike"
magnitude = [10, 100]
onset = 4
duration = 2
[[perturbation]]
onset = 4
chain = [{{kind = "lr_spike", magnitude = 10, duration = "end"}}, {{kind = "lower_learning_rate", magnitude = 0.1}}]
""",
    "grpo": HEADER
    + """
[task]
kind = "dialogue"
name = "hop"
entities = 3
hops = 2
difficulty = 1.0
length = 13
[learner]
kind = "grpo"
checkpoint = "gpt2"
lora_rank = 1
prompts = 2
group_size = 4
epochs = 1
learning_rate = 1e-2
performance_rows = 4
performance_every = 2
[[perturbation]]
kind = "stale_policy"
magnitude = 2
onset = 4
duration = "end"
""",
    "sac": HEADER
    + """
[task]
kind = "mujoco"
name = "InvertedPendulum-v5"
[learner]
kind = "sac"
num_envs = 2
iteration_steps = 32
learning_starts = 40
batch_size = 16
buffer_size = 150
hidden = [8]
evaluations = 1
evaluation_episodes = 1
[[perturbation]]
kind = "reward_scale"
magnitude = 10
onset = 4
duration = 2
""",
}


def make(folder: Path) -> None:
    """Writes the monitor and trains the runs, each in its subfolder of `folder`."""
    folder.mkdir(parents=True)
    learner = ja.learners.ppo("CartPole-v1", **PPO)
    clean = ja.audit(learner, [], seeds=range(100, 130), steps=8, settings=ja.metrics.MetricSettings(2))
    ja.Monitor.fit(clean.telemetry.isel(condition=0), model="chart").save(folder / "clean.npz")
    hop = ja.dialogues.Hop(entities=3, hops=2, difficulty=1.0, length=13)
    model = gpt2.GPT2(hop.vocabulary, hop.length, gpt2.SIZES["micro"])
    params = gpt2.init_params(model, jax.random.key(0))
    # Rounding makes the archive smaller.
    rounded = jax.tree.map(lambda x: x.astype(jnp.bfloat16).astype(jnp.float32), params)
    gpt2_checkpoint.save(folder / "gpt2", rounded, model)
    for name, text in SPECS.items():
        (folder / f"{name}.toml").write_text(text.format(name=name))
        command = [sys.executable, "-m", "jaxaudit", "run", f"{name}.toml", "-o", name]
        subprocess.run(command, check=True, cwd=folder)  # paths in specs begin at the working folder
        (folder / name / "report.html").unlink()
        shutil.rmtree(folder / name / "figures")
    kill_after_baseline([sys.executable, "-m", "jaxaudit", "run", "ppo.toml", "-o", "killed"], folder)


def kill_after_baseline(command: list[str], folder: Path) -> None:
    """Starts a run in `folder`/killed, and kills it when the state at its onset is stored."""
    process = subprocess.Popen(command, cwd=folder)
    while not (folder / "killed" / "checkpoints" / "onset-00000004").exists():
        if process.poll() is not None:
            raise SystemExit("the run ended before it could be killed")
        time.sleep(0.01)
    process.kill()
    process.wait()


def main() -> None:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--archive", action="store_true", help="pack the runs as tests/data/run-0.3.tar.gz, too")
    options = parser.parse_args()
    make(options.folder)
    if options.archive:
        with tarfile.open(Path(__file__).with_name("run-0.3.tar.gz"), "w:gz") as archive:
            for path in sorted(options.folder.iterdir()):
                archive.add(path, f"run-0.3/{path.name}")


if __name__ == "__main__":
    main()
