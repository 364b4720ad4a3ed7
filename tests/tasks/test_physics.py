"""Tests which engine simulates a run's task: it is chosen when the run is planned, stored, and kept by later commands.

The learner does not simulate anything, so that any engine can be stored for it; GPUs are only reported by a patched
JAX.
"""

import shutil
from types import SimpleNamespace

import jax
import pytest
from cli_errors import folder_digests
from quadratic import quadratic
from small_runs import SHORT_SPEC, error_sentence
from worker_runs import InProcessBackend

from jaxaudit.core.task_kinds import Simulated, resolved
from jaxaudit.monitoring.labelled_lanes import group_key
from jaxaudit.runs import lifecycle as durable
from jaxaudit.runs import workers
from jaxaudit.runs.replay import replay
from jaxaudit.runs.run_folder import Folder
from jaxaudit.runs.run_opening import open_run
from jaxaudit.runtime import registry
from jaxaudit.runtime.errors import UserError
from jaxaudit.runtime.machine import recorded_platform
from jaxaudit.spec.document import load, parse
from jaxaudit.tasks import Mujoco, Registered
from jaxaudit.text import Text

pytestmark = pytest.mark.exhaustive

NAME_LINE = 'name = "InvertedPendulum-v5"'


def spec_of(physics):
    return SHORT_SPEC.replace(NAME_LINE, f'{NAME_LINE}\nphysics = "{physics}"')


@pytest.fixture(scope="module")
def finished_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("finished") / "run"
    durable.run(parse(SHORT_SPEC), folder)
    return folder


@pytest.fixture
def copied_run(finished_run, tmp_path):
    shutil.copytree(finished_run, tmp_path / "run")
    return tmp_path / "run"


@pytest.fixture
def untrained_run(tmp_path, monkeypatch):
    """Creates a run of which nothing is trained yet, and returns its folder."""
    with monkeypatch.context() as patch:
        patch.setattr(durable, "_execute", lambda *arguments: None)
        durable.run(parse(SHORT_SPEC), tmp_path / "begun")
    return tmp_path / "begun"


@pytest.fixture
def gpu_backend(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")


@pytest.fixture
def recorded_tasks(monkeypatch):
    """Returns a list to which the task of every learner is appended."""
    tasks = []

    def recording_learner(task, **settings):
        tasks.append(task)
        return quadratic(task, **settings)

    recording_learner.settings = quadratic.settings
    monkeypatch.setitem(registry.learners._entries, "quadratic", recording_learner)
    return tasks


def stored_physics(folder):
    return load(folder / "spec.toml").task.physics


def rewrite_stored_physics(folder, physics, device="cpu"):
    """Rewrites a run as if it had stored these physics and begun on a device of this kind."""
    path = folder / "spec.toml"
    path.write_text(path.read_text().replace('physics = "c"', f'physics = "{physics}"'))
    Folder(folder).update_environment(device_kind=device)


def test_auto_physics_is_resolved_by_platform():
    for task in (Mujoco("Ant-v5"), Registered("Ant-v5")):
        task_on_platform = {platform: resolved(task, platform) for platform in ("cpu", "gpu", "tpu")}
        assert {platform: resolved_task.physics for platform, resolved_task in task_on_platform.items()} == {
            "cpu": "c",
            "gpu": "mjx",
            "tpu": "mjx",
        }
        assert {type(resolved_task) for resolved_task in task_on_platform.values()} == {type(task)}
    assert resolved(Mujoco("Ant-v5", "c"), "gpu").physics == "c"
    cartpole = Registered("CartPole-v1")
    assert resolved(cartpole, "gpu") is cartpole
    assert not isinstance(Text(), Simulated)
    assert [
        recorded_platform(environment) for environment in ({"device_kind": "cpu"}, {"device_kind": "NVIDIA H200"}, {})
    ] == [
        "cpu",
        "gpu",
        "",
    ]


@pytest.mark.exhaustive
def test_a_run_stores_the_engine_that_trains_it(finished_run, recorded_tasks, tmp_path, monkeypatch):
    assert stored_physics(finished_run) == "c"
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    durable.run(parse(SHORT_SPEC), tmp_path / "run")
    assert stored_physics(tmp_path / "run") == "mjx"
    assert {task.physics for task in recorded_tasks} == {"mjx"}


@pytest.fixture
def gpu_workers(monkeypatch):
    """Returns a backend whose workers run in this process, where JAX reports GPUs while they work."""
    backend = InProcessBackend()

    def with_gpu(function):
        def call(*arguments, **keywords):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(jax, "default_backend", lambda: "gpu")
                return function(*arguments, **keywords)

        return call

    monkeypatch.setattr(durable, "open_backend", backend.open_backend)
    monkeypatch.setattr(durable, "begin", with_gpu(durable.begin))
    monkeypatch.setattr(workers, "train_batch", with_gpu(workers.train_batch))
    return backend


@pytest.mark.exhaustive
def test_workers_choose_the_engine_and_not_the_driver(recorded_tasks, gpu_workers, tmp_path):
    durable.run(parse(SHORT_SPEC), tmp_path / "run", gpu_workers)
    assert [call for call, _ in gpu_workers.submitted][:2] == ["jaxaudit.runs.lifecycle:begin", workers.TRAIN_BATCH]
    assert jax.default_backend() == "cpu"
    assert stored_physics(tmp_path / "run") == "mjx"
    assert {task.physics for task in recorded_tasks} == {"mjx"}


def test_workers_with_another_default_engine_refuse_to_resume(untrained_run, gpu_workers):
    with pytest.raises(UserError, match="begun with physics 'c' and needs it, and here, where JAX runs on 'gpu'"):
        durable.resume(untrained_run, gpu_workers)


def test_a_stored_auto_is_resolved_by_the_recorded_device(copied_run, capsys):
    rewrite_stored_physics(copied_run, "auto", "cpu")
    assert open_run(copied_run)[1].task.physics == "c"
    assert replay(copied_run).equal
    rewrite_stored_physics(copied_run, "auto", "NVIDIA H200")
    assert open_run(copied_run)[1].task.physics == "mjx"
    comparison = replay(copied_run)
    assert comparison.equal
    assert comparison.differences == (("device_kind", "NVIDIA H200", "cpu"),)
    assert stored_physics(copied_run) == "auto", "the stored spec does not change"


@pytest.mark.parametrize("stored", ["c", "auto"])
@pytest.mark.parametrize("command", ["resume", "fork", "replay", "margin"])
def test_a_run_with_c_physics_is_refused_on_gpus(stored, command, copied_run, run_cli, gpu_backend):
    rewrite_stored_physics(copied_run, stored)
    if command == "resume":
        Folder(copied_run).update_environment(status="interrupted")
    before = folder_digests(copied_run)
    (copied_run.parent / "spec.toml").write_text(SHORT_SPEC)
    arguments = [copied_run.parent / "spec.toml", "-o", copied_run.parent / "fork"] if command == "fork" else []
    done = run_cli(command, copied_run, *arguments)
    words = (
        "was begun with physics 'c' and needs it, and here, where JAX runs on 'gpu', physics would be 'mjx': ",
        "set JAX_PLATFORMS=cpu",
        "or run its spec again in another folder",
    )
    error_sentence(done, 2, *words)
    assert folder_digests(copied_run) == before
    assert {path.name for path in copied_run.parent.iterdir()} == {"run", "spec.toml"}


@pytest.mark.parametrize("stored", ["mjx", "auto"])
def test_a_run_with_mjx_resumes_and_replays_without_gpus(stored, untrained_run, recorded_tasks):
    """A run that was begun on a GPU keeps its engine."""
    rewrite_stored_physics(untrained_run, stored, "NVIDIA H200")
    recorded_tasks.clear()
    durable.resume(untrained_run)
    assert replay(untrained_run).equal
    assert {task.physics for task in recorded_tasks} == {"mjx"}


def test_a_fork_keeps_the_engine_of_its_run(copied_run, tmp_path):
    rewrite_stored_physics(copied_run, "mjx", "NVIDIA H200")
    durable.fork(copied_run, parse(SHORT_SPEC), tmp_path / "fork")
    assert stored_physics(tmp_path / "fork") == "mjx"
    with pytest.raises(UserError, match=r"must keep the run's task \(physics 'mjx', not 'c'\)$"):
        durable.fork(copied_run, parse(spec_of("c")), tmp_path / "other")
    changed_spec = parse(spec_of("c").replace("seeds = 3", "seeds = 2"))
    with pytest.raises(UserError, match=r"must keep the run's task \(physics 'mjx', not 'c'\) and seeds$"):
        durable.fork(copied_run, changed_spec, tmp_path / "other")
    assert not (tmp_path / "other").exists()


@pytest.mark.exhaustive
def test_a_run_with_stored_auto_is_forked_with_its_engine(copied_run, tmp_path):
    rewrite_stored_physics(copied_run, "auto")
    durable.fork(copied_run, parse(spec_of("c")), tmp_path / "fork")
    assert stored_physics(tmp_path / "fork") == "c"


def test_a_run_like_another_keeps_its_engine(copied_run, tmp_path):
    rewrite_stored_physics(copied_run, "mjx", "NVIDIA H200")
    durable.run(parse(SHORT_SPEC), tmp_path / "again", like=copied_run)
    assert stored_physics(tmp_path / "again") == "mjx"
    with pytest.raises(UserError, match=r"to take the plan of .*run, the spec must keep its task \(physics 'mjx', not"):
        durable.run(parse(spec_of("c")), tmp_path / "other", like=copied_run)


def test_group_keys_of_runs_depend_on_the_resolved_engine():
    def run(physics, device, name="Ant-v5"):
        task = {"kind": "mujoco", "name": name, "physics": physics}
        return SimpleNamespace(
            folder="run", spec={"task": task, "learner": {}}, environment={"device_kind": device}, steps=20
        )

    assert group_key(run("auto", "cpu")) == group_key(run("c", "cpu"))
    assert group_key(run("auto", "NVIDIA H200")) == group_key(run("mjx", "NVIDIA H200"))
    assert group_key(run("auto", "cpu")) != group_key(run("auto", "NVIDIA H200"))
    assert group_key(run("auto", "cpu", "CartPole-v1")) == group_key(run("auto", "NVIDIA H200", "CartPole-v1"))
    assert group_key(run("auto", "cpu", "of another package")) != group_key(run("c", "cpu", "of another package"))
