"""Tests tasks and their engines against Gymnasium and C MuJoCo, and with invalid inputs."""

import functools
import os
import subprocess
import sys

import gymnasium
import jax
import jax.numpy as jnp
import mujoco
import numpy as np
import pytest
from fusion_emitters import emitters, takes
from scipy import stats

from jaxaudit.runtime import machine
from jaxaudit.tasks import TASKS, engine_c, engine_mjx, make
from jaxaudit.tasks._brax import mjx
from jaxaudit.tasks.engine import PhysicsState

pytestmark = pytest.mark.long

NAMES = sorted(TASKS)
MJX_QUICK = ("InvertedPendulum-v5",)  # quick to compile
TOLERANCE = {"c": 1e-6, "mjx": 1e-4}
STEPS = 1000
NUM_ENVS = 20  # at 1,000, jaxlib's Cholesky factorisation, which MJX calls, can deadlock on two cores


def parametrize_tasks(*quick):
    """Parametrizes by every task, on C; all but some are marked slow."""
    marked = [pytest.param(name, marks=[] if name in quick else [pytest.mark.slow]) for name in NAMES]
    return pytest.mark.parametrize("name", marked)


def parametrize_engines(quick=NAMES):
    """Parametrizes by every task on both engines; all but some on C and one on MJX are marked slow."""
    marked = [
        pytest.param(name, physics, id=f"{name}-{physics}", marks=[] if name in not_slow else [pytest.mark.slow])
        for physics, not_slow in (("c", quick), ("mjx", MJX_QUICK))
        for name in NAMES
    ]
    return pytest.mark.parametrize(("name", "physics"), marked)


@pytest.fixture(autouse=True, scope="module")
def load_models_once():
    """Loads a model of jaxaudit first, after which Gymnasium loads its models without a warning, too."""
    env_of(NAMES[0], "c")


@functools.cache
def env_of(name, physics):
    return make(name, physics)


def compiled(function, physics):
    """Compiles for a test, MJX in a quarter of the usual time.

    The fusion emitters of jaxlib 0.10 also make the kinematics of Pusher a thousand times slower.
    """
    options = {**emitters(False), "xla_backend_optimization_level": 0}
    return jax.jit(function, compiler_options=options if physics == "mjx" and jax.default_backend() == "cpu" else None)


def test_compiler_options_are_used_only_if_xla_has_them():
    """jaxlib 0.11 has no option for fusion emitters; an invalid value of an existing option is an error."""
    assert takes("xla_cpu_parallel_codegen_split_count", 1)
    assert not takes("xla_cpu_parallel_codegen_split_counts", 1)
    with pytest.raises(jax.errors.JaxRuntimeError, match="not a valid"):
        takes("xla_cpu_parallel_codegen_split_count", "one")
    old = jax.lib.__version__.split(".")[:2] == ["0", "10"]
    assert emitters(False) == ({"xla_cpu_use_fusion_emitters": False} if old else {})


def columns_of(name, data):
    """Returns the columns of a PhysicsState for an MjData."""
    env = env_of(name, "c")
    core = np.concatenate([data.qpos, data.qvel, data.act, data.qacc_warmstart])
    derived = {field: getattr(data, field).copy() for field in env.task.needs}
    return np.concatenate([core, env.physics(core, derived).track]) if env.tracked else core


@functools.cache
def gymnasium_steps(name):
    """Returns 1,000 steps of Gymnasium with random actions, a tenth out of bounds, and the states before them."""
    rng = np.random.default_rng(0)
    reference = gymnasium.make(name)
    data, space = reference.unwrapped.data, reference.action_space
    rows, parts = [], []
    episode = 0
    reference.reset(seed=episode)
    for t in range(STEPS):
        before = columns_of(name, data)
        scale = 1.5 if t % 10 == 0 else 1.0
        action = scale * rng.uniform(space.low, space.high)
        action = action.astype(np.float32).astype(np.float64)
        observation, reward, terminated, truncated, info = reference.step(action)
        rows.append((before, action, observation, reward, terminated))
        parts.append([info.get(part, np.nan) for part in env_of(name, "c").parts])
        if terminated or truncated:
            episode += 1
            reference.reset(seed=episode)
    return (*(np.array(column) for column in zip(*rows, strict=True)), np.array(parts))


@functools.cache
def step_of(name, physics):
    """Returns the jitted step of `NUM_ENVS` environments, compiled once for all tests."""
    return compiled(jax.vmap(env_of(name, physics).step), physics)


@functools.cache
def reset_of(name, physics):
    return compiled(jax.vmap(env_of(name, physics).reset), physics)


def resets(name, physics, seed=0):
    return reset_of(name, physics)(jax.random.split(jax.random.key(seed), NUM_ENVS))


def from_states(name, physics, step, columns, actions, info=None):
    """Takes a step from each of Gymnasium's states."""
    high = columns.astype(np.float32)
    low = (columns - high).astype(np.float32) if physics == "c" else np.zeros_like(high)
    state = resets(name, physics)
    if info is not None:
        state = state.replace(info=info)
    outcomes = []
    for rows in np.split(np.arange(len(columns)), len(columns) // NUM_ENVS):
        synchronised = state.replace(pipeline_state=PhysicsState(jnp.array(high[rows]), jnp.array(low[rows])))
        outcomes.append(step(synchronised, jnp.array(actions[rows], jnp.float32)))
    return jax.tree.map(lambda *parts: np.concatenate(parts), *outcomes)


@functools.cache
def stepped(name, physics):
    before, actions, *_ = gymnasium_steps(name)
    return from_states(name, physics, step_of(name, physics), before, actions)


def assert_close(result, observation, reward, tolerance):
    # Errors are relative to the vector: a component near zero has no relative precision in float32.
    size = np.maximum(1.0, np.abs(observation).max(axis=1))
    error = np.abs(np.asarray(result.obs, np.float64) - observation).max(axis=1) / size
    assert np.quantile(error, 0.99) < tolerance
    error = np.abs(np.asarray(result.reward, np.float64) - reward) / np.maximum(1.0, np.abs(reward))
    assert np.quantile(error, 0.99) < tolerance


@parametrize_engines()
class TestAgainstGymnasium:
    def test_observations_and_rewards_are_equal(self, name, physics):
        _, _, observation, reward, _, _ = gymnasium_steps(name)
        assert_close(stepped(name, physics), observation, reward, TOLERANCE[physics])

    def test_terminations_are_equal(self, name, physics):
        terminated = gymnasium_steps(name)[4]
        np.testing.assert_array_equal(np.asarray(stepped(name, physics).done) > 0.5, terminated)

    def test_parts_of_the_reward_are_equal(self, name, physics):
        """Parts have the names in Gymnasium's info, except for a constant of HumanoidStandup that is not in it."""
        expected = gymnasium_steps(name)[5]
        metrics = stepped(name, physics).metrics
        assert set(metrics) == set(env_of(name, physics).parts)
        for part, values in zip(env_of(name, physics).parts, expected.T, strict=True):
            if (name, part) == ("HumanoidStandup-v5", "reward_survive"):
                values = np.ones(STEPS)
            error = np.abs(np.asarray(metrics[part], np.float64) - values) / np.maximum(1.0, np.abs(values))
            assert np.quantile(error, 0.99) < TOLERANCE[physics], part

    def test_spaces_are_equal(self, name, physics):
        env, reference = env_of(name, physics), gymnasium.make(name)
        assert env.observation_size == reference.observation_space.shape[0]
        assert env.action_size == reference.action_space.shape[0]
        assert env.backend == physics
        np.testing.assert_array_equal(env.action_low, reference.action_space.low)
        np.testing.assert_array_equal(env.action_high, reference.action_space.high)
        assert env.max_episode_steps == reference.spec.max_episode_steps
        assert env.dt == reference.unwrapped.dt


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", NAMES)
def test_trajectories_on_c_follow_gymnasiums(name):
    """One hundred steps in 32-bit JAX do not lose precision of the trajectory."""
    env, reference = env_of(name, "c"), gymnasium.make(name)
    step, state = step_of(name, "c"), resets(name, "c", seed=1)
    reference.reset(seed=0)
    start = env.physics(np.asarray(state.pipeline_state.high[0], np.float64))
    reference.unwrapped.set_state(start.qpos, start.qvel)
    low, high = env.action_low, env.action_high
    actions = np.random.default_rng(2).uniform(low, high, (100, env.action_size)).astype(np.float32) * 0.1

    results = []
    for action in actions:
        state = step(state, np.tile(action, (NUM_ENVS, 1)))
        results.append((np.asarray(state.obs)[0], np.asarray(state.reward)[0]))
    expected = [reference.unwrapped.step(action.astype(np.float64))[:2] for action in actions]
    for result, reference_result in zip(zip(*results, strict=True), zip(*expected, strict=True), strict=True):
        np.testing.assert_allclose(result, reference_result, rtol=1e-5, atol=1e-6)
    assert np.abs(np.asarray(state.pipeline_state.low)[0]).max() > 0


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", NAMES)
def test_resets_have_gymnasiums_distribution(name):
    env, reference = env_of(name, "c"), gymnasium.make(name)
    batches = [resets(name, "c", seed) for seed in range(3, 3 + 2000 // NUM_ENVS)]
    state = jax.tree.map(lambda *parts: np.concatenate(parts), *batches)
    data = reference.unwrapped.data
    observations, coordinates = [], []
    for seed in range(2000):
        observations.append(reference.reset(seed=seed)[0])
        coordinates.append(np.concatenate([data.qpos, data.qvel]))
    physics = env.physics(np.asarray(state.pipeline_state.high))
    reset_coordinates = np.concatenate([physics.qpos, physics.qvel], axis=1)
    for sample, reference_sample in ((state.obs, observations), (reset_coordinates, coordinates)):
        # Values are rounded, so that those that are constant up to rounding are equal.
        sample, reference_sample = np.round(np.asarray(sample, np.float64), 6), np.round(reference_sample, 6)
        pvalues = [stats.ks_2samp(sample[:, i], reference_sample[:, i]).pvalue for i in range(sample.shape[1])]
        assert min(pvalues) > 1e-4
    random_coordinates = reset_coordinates[:, reset_coordinates.std(axis=0) > 0]
    correlation = np.corrcoef(random_coordinates.T) - np.eye(random_coordinates.shape[1])
    assert np.abs(correlation).max() < 0.12
    np.testing.assert_array_equal(state.pipeline_state.low[:, : reset_coordinates.shape[1]], 0)


@parametrize_tasks(*MJX_QUICK)
def test_both_engines_have_the_same_resets(name):
    c, mjx = resets(name, "c"), resets(name, "mjx")
    np.testing.assert_allclose(c.pipeline_state.high, mjx.pipeline_state.high, atol=1e-6)
    np.testing.assert_allclose(c.obs, mjx.obs, rtol=1e-5, atol=1e-5)


@parametrize_engines()
def test_divergence_does_not_reach_other_environments(name, physics):
    """All batches have the same width, so that the other environments must be equal bitwise."""
    env = env_of(name, physics)
    step = step_of(name, physics)
    clean = resets(name, physics)
    action = np.full((NUM_ENVS, env.action_size), 0.01, np.float32)

    bad_action = action.copy()
    bad_action[0] = np.nan
    bad_action[1, -1] = np.inf
    high = np.array(clean.pipeline_state.high)
    high[2, 1] = 1e9  # finite: the simulation itself diverges
    high[2, env.model.nq :] = 1e9
    high[3] = np.nan
    diverging = clean.replace(pipeline_state=PhysicsState(jnp.array(high), clean.pipeline_state.low))

    expected, result = step(clean, action), step(diverging, bad_action)
    for after, steps in ((result, 1), (step(result, action), 2)):
        assert np.isnan(after.obs[2:4]).all()
        assert np.isnan(after.reward[2:4]).all()
        assert not np.asarray(after.done[:4]).any()
        assert np.isfinite(after.obs[4:]).all(), steps
    assert np.isnan(result.obs[:2]).all()
    assert np.isnan(result.reward[:2]).all()
    np.testing.assert_array_equal(result.pipeline_state.high[:2], clean.pipeline_state.high[:2])
    np.testing.assert_array_equal(result.obs[4:], expected.obs[4:])
    np.testing.assert_array_equal(result.reward[4:], expected.reward[4:])


QUICK = ("HalfCheetah-v5", "Humanoid-v5")  # one observes its coordinates only, one also other fields
FACTORS = {"friction": 0.7, "gear": 1.2, "gravity": 0.9, "mass": 1.3}


def dynamics_of_all(**factors):
    """Returns the same factors for all environments."""
    return {"dynamics": {name: jnp.full(NUM_ENVS, factors.get(name, 1.0), jnp.float32) for name in FACTORS}}


@pytest.mark.exhaustive
class TestDynamics:
    @parametrize_engines(QUICK)
    def test_shifted_dynamics_equal_a_changed_model(self, name, physics):
        before, actions, *_ = gymnasium_steps(name)
        reference = gymnasium.make(name).unwrapped
        reference.reset(seed=0)
        model, data = reference.model, reference.data
        factors = {name: np.float64(np.float32(factor)) for name, factor in FACTORS.items()}
        for field in ("body_mass", "body_inertia", "body_subtreemass"):
            getattr(model, field)[:] *= factors["mass"]
        model.geom_friction[:] *= factors["friction"]
        model.actuator_gear[:] *= factors["gear"]
        model.opt.gravity[:] *= factors["gravity"]
        if physics == "mjx":
            # HumanoidStandup's solver is projected Gauss-Seidel, which MJX lacks, and whose error is 1.3e-4 here.
            model.opt.solver, model.opt.iterations = mujoco.mjtSolver.mjSOL_NEWTON, 100
        observations, rewards = [], []
        for columns, action in zip(before, actions, strict=True):
            mujoco.mj_resetData(model, data)
            physics_state = env_of(name, "c").physics(columns)
            data.qpos[:], data.qvel[:] = physics_state.qpos, physics_state.qvel
            mujoco.mj_forward(model, data)
            data.qacc_warmstart[:] = columns[model.nq + model.nv :][: model.nv]
            observation, reward, *_ = reference.step(action)
            observations.append(observation)
            rewards.append(reward)
        step = step_of(name, physics)
        # Gymnasium's `track` before the step is of a state that was just set, without a lag.
        start = before
        if env_of(name, "c").tracked:
            start = np.array([at_rest(name, columns, model) for columns in start])
        result = from_states(name, physics, step, start, actions, dynamics_of_all(**FACTORS))
        assert_close(result, np.array(observations), np.array(rewards), TOLERANCE[physics])
        neutral = from_states(name, physics, step, start, actions, dynamics_of_all())
        assert np.abs(np.asarray(neutral.obs) - np.asarray(result.obs)).max() > 1e-3

    @parametrize_tasks(*QUICK)
    def test_neutral_factors_are_bitwise_without_effect_on_c(self, name):
        before, actions, *_ = gymnasium_steps(name)
        result = from_states(name, "c", step_of(name, "c"), before, actions, dynamics_of_all())
        assert {key: float(value) for key, value in env_of(name, "c").dynamics.items()} == dict.fromkeys(FACTORS, 1.0)
        for field in ("pipeline_state", "obs", "reward", "done", "metrics"):
            jax.tree.map(np.testing.assert_array_equal, getattr(result, field), getattr(stepped(name, "c"), field))

    @pytest.mark.parametrize(
        ("name", "physics"),
        [
            ("HalfCheetah-v5", "c"),
            pytest.param("Reacher-v5", "c", marks=pytest.mark.slow),
            pytest.param("Ant-v5", "c", marks=pytest.mark.slow),
            ("InvertedPendulum-v5", "mjx"),
        ],
    )
    def test_each_environment_has_its_own_dynamics(self, name, physics):
        step = step_of(name, physics)
        state = resets(name, physics)
        action = np.full((NUM_ENVS, env_of(name, physics).action_size), 0.5, np.float32)
        factors = {key: np.ones(NUM_ENVS, np.float32) for key in FACTORS}
        expected = step(state.replace(info={"dynamics": dict(factors)}), action)
        factors["mass"] = factors["mass"].copy()
        factors["mass"][:7] = [np.nan, np.inf, 0.0, -1.0, 1e-38, 1e38, 2.0]
        factors["gravity"] = factors["gravity"].copy()
        factors["gravity"][7] = np.nan
        result = step(state.replace(info={"dynamics": factors}), action)
        for invalid in (0, 1, 2, 3, 7):
            assert np.isnan(result.obs[invalid]).all()
            assert np.isnan(result.reward[invalid])
            np.testing.assert_array_equal(result.pipeline_state.high[invalid], state.pipeline_state.high[invalid])
        assert not np.asarray(result.done[:8]).any()
        assert np.isfinite(result.obs[6]).all()
        assert (np.asarray(result.obs[6]) != np.asarray(expected.obs[6])).any()
        np.testing.assert_array_equal(result.obs[8:], expected.obs[8:])
        np.testing.assert_array_equal(result.pipeline_state.high[8:], expected.pipeline_state.high[8:])

    @pytest.mark.parametrize("name", ["HalfCheetah-v5", pytest.param("Ant-v5", marks=pytest.mark.slow)])
    def test_drifting_dynamics_do_not_accumulate_models(self, name):
        step, state = step_of(name, "c"), resets(name, "c")
        action = np.zeros((NUM_ENVS, env_of(name, "c").action_size), np.float32)

        def idle_counts():
            jax.block_until_ready(state)  # all batches are idle again
            return {key: len(idle) for key, idle in engine_c.idle_batches.items()}

        state = step(state.replace(info=dynamics_of_all(mass=0.9)), action)
        before = idle_counts()
        for factor in np.linspace(1.0, 2.0, 20):
            state = step(state.replace(info=dynamics_of_all(mass=factor, friction=factor)), action)
        assert idle_counts() == before
        assert all(len(idle) <= machine.core_count() for idle in engine_c.idle_workers.values())
        assert np.isfinite(state.obs).all()


def at_rest(name, columns, model):
    """Returns columns with the tracked positions of a state that was just set."""
    env = env_of(name, "c")
    data = mujoco.MjData(model)
    core = columns[: -env.tracked]
    physics = env.physics(columns)
    data.qpos[:], data.qvel[:] = physics.qpos, physics.qvel
    mujoco.mj_forward(model, data)
    derived = {field: getattr(data, field) for field in env.task.needs}
    return np.concatenate([core, env.physics(core, derived).track])


SPINNING = """
<mujoco>
  <option integrator="RK4" timestep="0.01"/>
  <worldbody>
    <geom type="plane" size="5 5 1" condim="3"/>
    <body pos="0 0 0.5">
      <freejoint/>
      <geom type="capsule" fromto="0 0 -0.3 0.1 0.05 0.3" size="0.1" condim="3"/>
      <body pos="0.1 0.05 0.3">
        <joint type="ball"/>
        <geom type="capsule" fromto="0 0 0 0.2 0.1 0.3" size="0.05" contype="0" conaffinity="0"/>
      </body>
    </body>
  </worldbody>
</mujoco>
"""


@pytest.mark.exhaustive
def test_mjx_rotations_and_contacts_equal_c_mujoco():
    """Bodies spin on free and ball joints, and a capsule stands nearly upright on a plane."""
    model = mujoco.MjModel.from_xml_string(SPINNING)
    in_jax, blank = mjx.put_model(model, impl="jax"), mjx.make_data(model, impl="jax")
    step = compiled(jax.vmap(lambda q, v: engine_mjx.step(in_jax, blank.replace(qpos=q, qvel=v))), "mjx")
    rng = np.random.default_rng(0)
    qpos = np.tile(model.qpos0, (100, 1))
    qpos[:, 2] -= rng.uniform(0.05, 0.15, 100)  # about half of them touch the plane
    qvel = 10 * rng.normal(size=(100, model.nv))
    result = step(jnp.array(qpos, jnp.float32), jnp.array(qvel, jnp.float32))
    data = mujoco.MjData(model)
    errors, touched = [], 0
    for i in range(100):
        mujoco.mj_resetData(model, data)
        data.qpos[:], data.qvel[:] = qpos[i], qvel[i]
        mujoco.mj_step(model, data)
        touched += data.ncon > 0
        error = np.abs(result.qvel[i] - data.qvel).max() / np.abs(data.qvel).max()
        errors.append(max(error, np.abs(result.qpos[i] - data.qpos).max()))
    assert 20 < touched < 100
    assert np.quantile(errors, 0.95) < 2e-5


@pytest.mark.exhaustive
def test_mjx_is_traced_once_for_all_callers(monkeypatch):
    traced = []
    forward = engine_mjx.forward
    monkeypatch.setattr(engine_mjx, "forward", lambda *arguments: traced.append(0) or forward(*arguments))
    env = make("InvertedPendulum-v5", "mjx")

    def step(state, action):
        return env.step(state, action).obs

    state, action = jax.eval_shape(env.reset, jax.random.key(0)), jnp.zeros(1)
    jax.eval_shape(step, state, action)
    n_traced = len(traced)
    assert n_traced
    wide = jax.tree.map(lambda x: jax.ShapeDtypeStruct((3, *x.shape), x.dtype), (state, action))
    jax.eval_shape(lambda *arguments: jax.lax.scan(lambda _, arguments: (0, step(*arguments)), 0, arguments)[1], *wide)
    jax.eval_shape(jax.vmap(step), *wide)
    assert len(traced) == n_traced


def run_python(code, cwd=None, **environment):
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=cwd,
        env=os.environ | {"JAX_PLATFORMS": "cpu"} | environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


@pytest.mark.exhaustive
def test_mujocos_warnings_are_not_printed_or_logged(tmp_path):
    """Runs in a separate process: MuJoCo would write to the console and to the working directory."""
    code = """
import jax, jax.numpy as jnp
from jaxaudit.tasks import make
from jaxaudit.tasks.engine import PhysicsState
env = make("HalfCheetah-v5", "c")
step = jax.jit(env.step)
state = jax.jit(env.reset)(jax.random.key(0))
wild = PhysicsState(state.pipeline_state.high.at[9:].set(1e9), state.pipeline_state.low)
out = step(state.replace(pipeline_state=wild), jnp.full(6, 1e9))
assert jnp.isnan(out.reward)
out = step(state, jnp.full(6, jnp.nan))
assert jnp.isnan(out.reward)
make("Pusher-v5", "c")
"""
    done = run_python(code, cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert not list(tmp_path.iterdir())


@parametrize_tasks("HalfCheetah-v5", "Ant-v5")
def test_nested_vmap_equals_a_flat_batch(name):
    env = env_of(name, "c")
    state = resets(name, "c", seed=5)
    action = np.random.default_rng(6).uniform(-1, 1, (NUM_ENVS, env.action_size)).astype(np.float32)
    nest = functools.partial(jax.tree.map, lambda x: x.reshape(4, NUM_ENVS // 4, *x.shape[1:]))
    flat = step_of(name, "c")(state, action)
    nested_resets = jax.jit(jax.vmap(jax.vmap(env.reset)))(jax.random.split(jax.random.key(5), (4, NUM_ENVS // 4)))
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), nest(state), nested_resets)
    nested = jax.jit(jax.vmap(jax.vmap(env.step)))(nest(state), nest(action))
    jax.tree.map(np.testing.assert_array_equal, nest(flat), nested)
    single = jax.jit(env.step)(jax.tree.map(lambda x: x[7], state), action[7])
    jax.tree.map(np.testing.assert_array_equal, jax.tree.map(lambda x: x[7], flat), single)
    # All lanes share an action, so that only some arguments have the lanes' axis.
    shared = jax.jit(jax.vmap(env.step, in_axes=(0, None)))(state, action[0])
    np.testing.assert_array_equal(shared.obs[0], flat.obs[0])


@pytest.mark.parametrize("name", ["HalfCheetah-v5", pytest.param("Humanoid-v5", marks=pytest.mark.slow)])
def test_the_c_engine_is_deterministic_in_scans(name):
    env = env_of(name, "c")

    @jax.jit
    def roll(key):
        state = jax.vmap(env.reset)(jax.random.split(key, 64))
        actions = jax.random.uniform(key, (20, 64, env.action_size), minval=-1.0)
        return jax.lax.scan(lambda s, a: (jax.vmap(env.step)(s, a), None), state, actions)[0]

    jax.tree.map(np.testing.assert_array_equal, roll(jax.random.key(7)), roll(jax.random.key(7)))


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("name", "width"), [("InvertedPendulum-v5", 20000), pytest.param("Ant-v5", 2000, marks=pytest.mark.slow)]
)
def test_large_batches_do_not_deadlock(name, width):
    """Host callbacks that wait for large JAX arrays hang if XLA has few threads."""
    code = f"""
import jax
from jaxaudit.tasks import make
env = make("{name}", "c")
state = jax.jit(jax.vmap(env.reset))(jax.random.split(jax.random.key(0), {width}))
step = jax.vmap(env.step)
n = env.action_size
roll = jax.jit(lambda s: jax.lax.scan(lambda s, _: (step(s, s.obs[:, :n]), None), s, length=5)[0])
assert roll(state).obs.shape == ({width}, env.observation_size)
print("done")
"""
    done = run_python(code, NPROC="2")
    assert (done.returncode, done.stdout.strip()) == (0, "done"), done.stderr


def test_make_names_the_allowed_tasks_and_engines():
    with pytest.raises(ValueError, match=r"'HalfCheeta-v5'.*HalfCheetah-v5.*InvertedPendulum-v5"):
        make("HalfCheeta-v5")
    with pytest.raises(ValueError, match=r"'mjc'.*auto.*c.*mjx"):
        make("HalfCheetah-v5", "mjc")
    with pytest.raises(ValueError, match=r"brax task 'ants' \(did you mean 'ant'\?\)"):
        make("brax:ants")
    with pytest.raises(ValueError, match=r"physics of a brax task 'c'; allowed: auto, generalized"):
        make("brax:ant", "c")
    assert make("HalfCheetah-v5").backend == ("c" if jax.default_backend() == "cpu" else "mjx")


def test_models_on_c_equal_gymnasiums():
    for name in NAMES:
        reference, model = gymnasium.make(name).unwrapped.model, env_of(name, "c").model
        assert (reference.opt.iterations, reference.opt.integrator) == (model.opt.iterations, model.opt.integrator)
        np.testing.assert_array_equal(reference.body_mass, model.body_mass)
        assert mujoco.mj_stateSize(model, mujoco.mjtState.mjSTATE_HISTORY) == 0
