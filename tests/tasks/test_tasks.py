"""Tasks and their engines against Gymnasium and C MuJoCo, and against misuse."""

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
MJX_QUICK = ("InvertedPendulum-v5",)  # to compile
TOLERANCE = {"c": 1e-6, "mjx": 1e-4}
STEPS = 1000
WIDTH = 20  # jaxlib's Cholesky factorisation, which MJX calls, can deadlock on two cores at 1,000


def tasks(*quick):
    """Every task, on C; slow but for these."""
    marked = [pytest.param(name, marks=[] if name in quick else [pytest.mark.slow]) for name in NAMES]
    return pytest.mark.parametrize("name", marked)


def on_both(quick=NAMES):
    """Every task on both engines; slow but for these on C and for one on MJX."""
    marked = [
        pytest.param(name, physics, id=f"{name}-{physics}", marks=[] if name in chosen else [pytest.mark.slow])
        for physics, chosen in (("c", quick), ("mjx", MJX_QUICK))
        for name in NAMES
    ]
    return pytest.mark.parametrize(("name", "physics"), marked)


@pytest.fixture(autouse=True, scope="module")
def silence():
    """Gymnasium, too, loads its models without a warning once one of ours is loaded."""
    env_of(NAMES[0], "c")


@functools.cache
def env_of(name, physics):
    return make(name, physics)


def compiled(function, physics):
    """Compile for a test: MJX in a quarter of the time.

    The fusion emitters of jaxlib 0.10, moreover, make the kinematics of Pusher a thousand times slower.
    """
    options = {**emitters(False), "xla_backend_optimization_level": 0}
    return jax.jit(function, compiler_options=options if physics == "mjx" and jax.default_backend() == "cpu" else None)


def test_a_compiler_option_is_given_where_xla_knows_it():
    """That of the fusion emitters is gone in jaxlib 0.11; what is wrong with a known option is not hidden."""
    assert takes("xla_cpu_parallel_codegen_split_count", 1)
    assert not takes("xla_cpu_parallel_codegen_split_counts", 1)
    with pytest.raises(jax.errors.JaxRuntimeError, match="not a valid"):
        takes("xla_cpu_parallel_codegen_split_count", "one")
    old = jax.lib.__version__.split(".")[:2] == ["0", "10"]
    assert emitters(False) == ({"xla_cpu_use_fusion_emitters": False} if old else {})


def columns_of(name, data):
    """What a PhysicsState holds of an MjData."""
    env = env_of(name, "c")
    core = np.concatenate([data.qpos, data.qvel, data.act, data.qacc_warmstart])
    derived = {field: getattr(data, field).copy() for field in env.task.needs}
    return np.concatenate([core, env.physics(core, derived).track]) if env.tracked else core


@functools.cache
def gymnasium_steps(name):
    """1,000 steps of Gymnasium under random actions, a tenth of them too large, and its state before each."""
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
    """One env step of `WIDTH` environments, compiled once for all tests."""
    return compiled(jax.vmap(env_of(name, physics).step), physics)


@functools.cache
def reset_of(name, physics):
    return compiled(jax.vmap(env_of(name, physics).reset), physics)


def resets(name, physics, seed=0):
    return reset_of(name, physics)(jax.random.split(jax.random.key(seed), WIDTH))


def from_states(name, physics, step, columns, actions, info=None):
    """One step of ours from each of Gymnasium's states."""
    high = columns.astype(np.float32)
    low = (columns - high).astype(np.float32) if physics == "c" else np.zeros_like(high)
    state = resets(name, physics)
    if info is not None:
        state = state.replace(info=info)
    outcomes = []
    for rows in np.split(np.arange(len(columns)), len(columns) // WIDTH):
        synchronised = state.replace(pipeline_state=PhysicsState(jnp.array(high[rows]), jnp.array(low[rows])))
        outcomes.append(step(synchronised, jnp.array(actions[rows], jnp.float32)))
    return jax.tree.map(lambda *parts: np.concatenate(parts), *outcomes)


@functools.cache
def stepped(name, physics):
    before, actions, *_ = gymnasium_steps(name)
    return from_states(name, physics, step_of(name, physics), before, actions)


def assert_close(ours, observation, reward, tolerance):
    # Relative to the vector: a component that passes through zero has no relative precision in float32.
    size = np.maximum(1.0, np.abs(observation).max(axis=1))
    error = np.abs(np.asarray(ours.obs, np.float64) - observation).max(axis=1) / size
    assert np.quantile(error, 0.99) < tolerance
    error = np.abs(np.asarray(ours.reward, np.float64) - reward) / np.maximum(1.0, np.abs(reward))
    assert np.quantile(error, 0.99) < tolerance


@on_both()
class TestAgainstGymnasium:
    def test_observation_and_reward(self, name, physics):
        _, _, observation, reward, _, _ = gymnasium_steps(name)
        assert_close(stepped(name, physics), observation, reward, TOLERANCE[physics])

    def test_termination(self, name, physics):
        terminated = gymnasium_steps(name)[4]
        np.testing.assert_array_equal(np.asarray(stepped(name, physics).done) > 0.5, terminated)

    def test_parts_of_the_reward(self, name, physics):
        """Under the names of Gymnasium's info, but for a constant of HumanoidStandup's that it does not tell."""
        expected = gymnasium_steps(name)[5]
        metrics = stepped(name, physics).metrics
        assert set(metrics) == set(env_of(name, physics).parts)
        for part, values in zip(env_of(name, physics).parts, expected.T, strict=True):
            if (name, part) == ("HumanoidStandup-v5", "reward_survive"):
                values = np.ones(STEPS)
            error = np.abs(np.asarray(metrics[part], np.float64) - values) / np.maximum(1.0, np.abs(values))
            assert np.quantile(error, 0.99) < TOLERANCE[physics], part

    def test_spaces(self, name, physics):
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
def test_c_follows_gymnasium_without_resynchronisation(name):
    """A hundred steps of 32-bit JAX lose nothing of the trajectory."""
    env, reference = env_of(name, "c"), gymnasium.make(name)
    step, state = step_of(name, "c"), resets(name, "c", seed=1)
    reference.reset(seed=0)
    start = env.physics(np.asarray(state.pipeline_state.high[0], np.float64))
    reference.unwrapped.set_state(start.qpos, start.qvel)
    low, high = env.action_low, env.action_high
    actions = np.random.default_rng(2).uniform(low, high, (100, env.action_size)).astype(np.float32) * 0.1

    found = []
    for action in actions:
        state = step(state, np.tile(action, (WIDTH, 1)))
        found.append((np.asarray(state.obs)[0], np.asarray(state.reward)[0]))
    expected = [reference.unwrapped.step(action.astype(np.float64))[:2] for action in actions]
    for ours, theirs in zip(zip(*found, strict=True), zip(*expected, strict=True), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)
    assert np.abs(np.asarray(state.pipeline_state.low)[0]).max() > 0


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", NAMES)
def test_reset_distribution(name):
    env, reference = env_of(name, "c"), gymnasium.make(name)
    drawn = [resets(name, "c", seed) for seed in range(3, 3 + 2000 // WIDTH)]
    state = jax.tree.map(lambda *parts: np.concatenate(parts), *drawn)
    data = reference.unwrapped.data
    seen, coordinates = [], []
    for seed in range(2000):
        seen.append(reference.reset(seed=seed)[0])
        coordinates.append(np.concatenate([data.qpos, data.qvel]))
    physics = env.physics(np.asarray(state.pipeline_state.high))
    own_coordinates = np.concatenate([physics.qpos, physics.qvel], axis=1)
    for ours, theirs in ((state.obs, seen), (own_coordinates, coordinates)):
        # Rounded, so that what is constant but for rounding is the same on both sides.
        ours, theirs = np.round(np.asarray(ours, np.float64), 6), np.round(theirs, 6)
        pvalues = [stats.ks_2samp(ours[:, i], theirs[:, i]).pvalue for i in range(ours.shape[1])]
        assert min(pvalues) > 1e-4
    random = own_coordinates[:, own_coordinates.std(axis=0) > 0]
    correlation = np.corrcoef(random.T) - np.eye(random.shape[1])
    assert np.abs(correlation).max() < 0.12
    np.testing.assert_array_equal(state.pipeline_state.low[:, : own_coordinates.shape[1]], 0)


@tasks(*MJX_QUICK)
def test_engines_share_the_reset(name):
    c, mjx = resets(name, "c"), resets(name, "mjx")
    np.testing.assert_allclose(c.pipeline_state.high, mjx.pipeline_state.high, atol=1e-6)
    np.testing.assert_allclose(c.obs, mjx.obs, rtol=1e-5, atol=1e-5)


@on_both()
def test_divergence_stays_in_its_environment(name, physics):
    """Same width throughout, so the healthy environments must not change by a bit."""
    env = env_of(name, physics)
    step = step_of(name, physics)
    clean = resets(name, physics)
    action = np.full((WIDTH, env.action_size), 0.01, np.float32)

    bad_action = action.copy()
    bad_action[0] = np.nan
    bad_action[1, -1] = np.inf
    high = np.array(clean.pipeline_state.high)
    high[2, 1] = 1e9  # finite: the simulation itself diverges
    high[2, env.model.nq :] = 1e9
    high[3] = np.nan
    broken = clean.replace(pipeline_state=PhysicsState(jnp.array(high), clean.pipeline_state.low))

    expected, ours = step(clean, action), step(broken, bad_action)
    for now, steps in ((ours, 1), (step(ours, action), 2)):
        assert np.isnan(now.obs[2:4]).all()
        assert np.isnan(now.reward[2:4]).all()
        assert not np.asarray(now.done[:4]).any()
        assert np.isfinite(now.obs[4:]).all(), steps
    assert np.isnan(ours.obs[:2]).all()
    assert np.isnan(ours.reward[:2]).all()
    np.testing.assert_array_equal(ours.pipeline_state.high[:2], clean.pipeline_state.high[:2])
    np.testing.assert_array_equal(ours.obs[4:], expected.obs[4:])
    np.testing.assert_array_equal(ours.reward[4:], expected.reward[4:])


QUICK = ("HalfCheetah-v5", "Humanoid-v5")  # one that observes nothing but its coordinates, and one that does
FACTORS = {"friction": 0.7, "gear": 1.2, "gravity": 0.9, "mass": 1.3}


def every(**factors):
    """The same factors in all environments."""
    return {"dynamics": {name: jnp.full(WIDTH, factors.get(name, 1.0), jnp.float32) for name in FACTORS}}


@pytest.mark.exhaustive
class TestDynamics:
    @on_both(QUICK)
    def test_a_shift_is_a_model_changed_by_hand(self, name, physics):
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
            # HumanoidStandup asks for projected Gauss-Seidel, which MJX lacks and which stops 1.3e-4 short here.
            model.opt.solver, model.opt.iterations = mujoco.mjtSolver.mjSOL_NEWTON, 100
        observations, rewards = [], []
        for columns, action in zip(before, actions, strict=True):
            mujoco.mj_resetData(model, data)
            physics_ = env_of(name, "c").physics(columns)
            data.qpos[:], data.qvel[:] = physics_.qpos, physics_.qvel
            mujoco.mj_forward(model, data)
            data.qacc_warmstart[:] = columns[model.nq + model.nv :][: model.nv]
            observation, reward, *_ = reference.step(action)
            observations.append(observation)
            rewards.append(reward)
        step = step_of(name, physics)
        # Gymnasium's own `track` before the step is that of a state just set, not of one that lags.
        start = before
        if env_of(name, "c").tracked:
            start = np.array([at_rest(name, columns, model) for columns in start])
        ours = from_states(name, physics, step, start, actions, every(**FACTORS))
        assert_close(ours, np.array(observations), np.array(rewards), TOLERANCE[physics])
        same = from_states(name, physics, step, start, actions, every())
        assert np.abs(np.asarray(same.obs) - np.asarray(ours.obs)).max() > 1e-3

    @tasks(*QUICK)
    def test_neutral_factors_change_no_bit_on_c(self, name):
        before, actions, *_ = gymnasium_steps(name)
        ours = from_states(name, "c", step_of(name, "c"), before, actions, every())
        assert {key: float(value) for key, value in env_of(name, "c").dynamics.items()} == dict.fromkeys(FACTORS, 1.0)
        for field in ("pipeline_state", "obs", "reward", "done", "metrics"):
            jax.tree.map(np.testing.assert_array_equal, getattr(ours, field), getattr(stepped(name, "c"), field))

    @pytest.mark.parametrize(
        ("name", "physics"),
        [
            ("HalfCheetah-v5", "c"),
            pytest.param("Reacher-v5", "c", marks=pytest.mark.slow),
            pytest.param("Ant-v5", "c", marks=pytest.mark.slow),
            ("InvertedPendulum-v5", "mjx"),
        ],
    )
    def test_each_environment_has_its_own(self, name, physics):
        step = step_of(name, physics)
        state = resets(name, physics)
        action = np.full((WIDTH, env_of(name, physics).action_size), 0.5, np.float32)
        factors = {key: np.ones(WIDTH, np.float32) for key in FACTORS}
        expected = step(state.replace(info={"dynamics": dict(factors)}), action)
        factors["mass"] = factors["mass"].copy()
        factors["mass"][:7] = [np.nan, np.inf, 0.0, -1.0, 1e-38, 1e38, 2.0]
        factors["gravity"] = factors["gravity"].copy()
        factors["gravity"][7] = np.nan
        ours = step(state.replace(info={"dynamics": factors}), action)
        for refused in (0, 1, 2, 3, 7):
            assert np.isnan(ours.obs[refused]).all()
            assert np.isnan(ours.reward[refused])
            np.testing.assert_array_equal(ours.pipeline_state.high[refused], state.pipeline_state.high[refused])
        assert not np.asarray(ours.done[:8]).any()
        assert np.isfinite(ours.obs[6]).all()
        assert (np.asarray(ours.obs[6]) != np.asarray(expected.obs[6])).any()
        np.testing.assert_array_equal(ours.obs[8:], expected.obs[8:])
        np.testing.assert_array_equal(ours.pipeline_state.high[8:], expected.pipeline_state.high[8:])

    @pytest.mark.parametrize("name", ["HalfCheetah-v5", pytest.param("Ant-v5", marks=pytest.mark.slow)])
    def test_a_drift_keeps_nothing(self, name):
        step, state = step_of(name, "c"), resets(name, "c")
        action = np.zeros((WIDTH, env_of(name, "c").action_size), np.float32)

        def kept():
            jax.block_until_ready(state)  # what is lent is idle again
            return {key: len(idle) for key, idle in engine_c.idle_batches.items()}

        state = step(state.replace(info=every(mass=0.9)), action)
        before = kept()
        for factor in np.linspace(1.0, 2.0, 20):
            state = step(state.replace(info=every(mass=factor, friction=factor)), action)
        assert kept() == before
        assert all(len(idle) <= machine.core_count() for idle in engine_c.idle_workers.values())
        assert np.isfinite(state.obs).all()


def at_rest(name, columns, model):
    """Columns with the tracked positions of a state that was just set."""
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
def test_mjx_turns_and_slides_as_c_mujoco():
    """Bodies that spin on free and ball joints, and a capsule that stands nearly upright on a plane."""
    model = mujoco.MjModel.from_xml_string(SPINNING)
    in_jax, blank = mjx.put_model(model, impl="jax"), mjx.make_data(model, impl="jax")
    step = compiled(jax.vmap(lambda q, v: engine_mjx.step(in_jax, blank.replace(qpos=q, qvel=v))), "mjx")
    rng = np.random.default_rng(0)
    qpos = np.tile(model.qpos0, (100, 1))
    qpos[:, 2] -= rng.uniform(0.05, 0.15, 100)  # half of them touch
    qvel = 10 * rng.normal(size=(100, model.nv))
    ours = step(jnp.array(qpos, jnp.float32), jnp.array(qvel, jnp.float32))
    data = mujoco.MjData(model)
    errors, touched = [], 0
    for i in range(100):
        mujoco.mj_resetData(model, data)
        data.qpos[:], data.qvel[:] = qpos[i], qvel[i]
        mujoco.mj_step(model, data)
        touched += data.ncon > 0
        error = np.abs(ours.qvel[i] - data.qvel).max() / np.abs(data.qvel).max()
        errors.append(max(error, np.abs(ours.qpos[i] - data.qpos).max()))
    assert 20 < touched < 100
    assert np.quantile(errors, 0.95) < 2e-5


@pytest.mark.exhaustive
def test_mjx_is_traced_once_wherever_programs_step_it(monkeypatch):
    traced = []
    forward = engine_mjx.forward
    monkeypatch.setattr(engine_mjx, "forward", lambda *given: traced.append(0) or forward(*given))
    env = make("InvertedPendulum-v5", "mjx")

    def step(state, action):
        return env.step(state, action).obs

    state, action = jax.eval_shape(env.reset, jax.random.key(0)), jnp.zeros(1)
    jax.eval_shape(step, state, action)
    once = len(traced)
    assert once
    wide = jax.tree.map(lambda x: jax.ShapeDtypeStruct((3, *x.shape), x.dtype), (state, action))
    jax.eval_shape(lambda *given: jax.lax.scan(lambda _, given: (0, step(*given)), 0, given)[1], *wide)
    jax.eval_shape(jax.vmap(step), *wide)
    assert len(traced) == once


def in_a_process(code, cwd=None, **environment):
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
def test_nothing_is_printed_or_logged(tmp_path):
    """In a process of its own: MuJoCo would write to the working directory and to the console."""
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
    done = in_a_process(code, cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert not list(tmp_path.iterdir())


@tasks("HalfCheetah-v5", "Ant-v5")
def test_nested_vmap_is_the_flat_batch(name):
    env = env_of(name, "c")
    state = resets(name, "c", seed=5)
    action = np.random.default_rng(6).uniform(-1, 1, (WIDTH, env.action_size)).astype(np.float32)
    nest = functools.partial(jax.tree.map, lambda x: x.reshape(4, WIDTH // 4, *x.shape[1:]))
    flat = step_of(name, "c")(state, action)
    fresh = jax.jit(jax.vmap(jax.vmap(env.reset)))(jax.random.split(jax.random.key(5), (4, WIDTH // 4)))
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), nest(state), fresh)
    nested = jax.jit(jax.vmap(jax.vmap(env.step)))(nest(state), nest(action))
    jax.tree.map(np.testing.assert_array_equal, nest(flat), nested)
    alone = jax.jit(env.step)(jax.tree.map(lambda x: x[7], state), action[7])
    jax.tree.map(np.testing.assert_array_equal, jax.tree.map(lambda x: x[7], flat), alone)
    # One action for all lanes: an axis only some arguments have.
    shared = jax.jit(jax.vmap(env.step, in_axes=(0, None)))(state, action[0])
    np.testing.assert_array_equal(shared.obs[0], flat.obs[0])


@pytest.mark.parametrize("name", ["HalfCheetah-v5", pytest.param("Humanoid-v5", marks=pytest.mark.slow)])
def test_c_engine_is_deterministic_and_scans(name):
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
    """A host callback that waits for JAX arrays hangs when XLA has few threads and the arrays are large."""
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
    done = in_a_process(code, NPROC="2")
    assert (done.returncode, done.stdout.strip()) == (0, "done"), done.stderr


def test_make_names_what_is_allowed():
    with pytest.raises(ValueError, match=r"'HalfCheeta-v5'.*HalfCheetah-v5.*InvertedPendulum-v5"):
        make("HalfCheeta-v5")
    with pytest.raises(ValueError, match=r"'mjc'.*auto.*c.*mjx"):
        make("HalfCheetah-v5", "mjc")
    with pytest.raises(ValueError, match=r"brax task 'ants' \(did you mean 'ant'\?\)"):
        make("brax:ants")
    with pytest.raises(ValueError, match=r"physics of a brax task 'c'; allowed: auto, generalized"):
        make("brax:ant", "c")
    assert make("HalfCheetah-v5").backend == ("c" if jax.default_backend() == "cpu" else "mjx")


def test_c_model_is_gymnasiums():
    for name in NAMES:
        theirs, ours = gymnasium.make(name).unwrapped.model, env_of(name, "c").model
        assert (theirs.opt.iterations, theirs.opt.integrator) == (ours.opt.iterations, ours.opt.integrator)
        np.testing.assert_array_equal(theirs.body_mass, ours.body_mass)
        assert mujoco.mj_stateSize(ours, mujoco.mjtState.mjSTATE_HISTORY) == 0
