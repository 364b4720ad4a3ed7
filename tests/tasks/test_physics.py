"""Which engine simulates a run's task: settled where the run is planned, stored with it, and kept by all that goes on.

The learner here simulates nothing, so that any engine can be stored for it, and GPUs are JAX's word for its devices.
"""

import shutil
from types import SimpleNamespace

import jax
import pytest
from quadratic import quadratic
from refusals import contents
from small_runs import FEW, one_sentence
from worker_runs import Calls

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

NAMED = 'name = "InvertedPendulum-v5"'


def spec_of(physics):
    return FEW.replace(NAMED, f'{NAMED}\nphysics = "{physics}"')


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("finished") / "run"
    durable.run(parse(FEW), folder)
    return folder


@pytest.fixture
def copied(finished, tmp_path):
    shutil.copytree(finished, tmp_path / "run")
    return tmp_path / "run"


@pytest.fixture
def begun(tmp_path, monkeypatch):
    """A run of which nothing is trained yet."""
    with monkeypatch.context() as patch:
        patch.setattr(durable, "_execute", lambda *arguments: None)
        durable.run(parse(FEW), tmp_path / "begun")
    return tmp_path / "begun"


@pytest.fixture
def on_a_gpu(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")


@pytest.fixture
def trained_on(monkeypatch):
    """The tasks that learners are made for."""
    tasks = []

    def noting(task, **settings):
        tasks.append(task)
        return quadratic(task, **settings)

    noting.settings = quadratic.settings
    monkeypatch.setitem(registry.learners._entries, "quadratic", noting)
    return tasks


def physics(folder):
    return load(folder / "spec.toml").task.physics


def stored_as(folder, physics, device="cpu"):
    """Makes a run one that stored these physics and was begun on such a device."""
    path = folder / "spec.toml"
    path.write_text(path.read_text().replace('physics = "c"', f'physics = "{physics}"'))
    Folder(folder).update_environment(device_kind=device)


def test_auto_is_what_the_devices_have():
    for task in (Mujoco("Ant-v5"), Registered("Ant-v5")):
        chosen = {platform: resolved(task, platform) for platform in ("cpu", "gpu", "tpu")}
        assert {platform: one.physics for platform, one in chosen.items()} == {"cpu": "c", "gpu": "mjx", "tpu": "mjx"}
        assert {type(one) for one in chosen.values()} == {type(task)}
    assert resolved(Mujoco("Ant-v5", "c"), "gpu").physics == "c"
    cartpole = Registered("CartPole-v1")
    assert resolved(cartpole, "gpu") is cartpole
    assert not isinstance(Text(), Simulated)
    assert [recorded_platform(told) for told in ({"device_kind": "cpu"}, {"device_kind": "NVIDIA H200"}, {})] == [
        "cpu",
        "gpu",
        "",
    ]


@pytest.mark.exhaustive
def test_a_run_stores_the_engine_it_is_trained_with(finished, trained_on, tmp_path, monkeypatch):
    assert physics(finished) == "c"
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    durable.run(parse(FEW), tmp_path / "run")
    assert physics(tmp_path / "run") == "mjx"
    assert {task.physics for task in trained_on} == {"mjx"}


@pytest.fixture
def gpu_workers(monkeypatch):
    """Workers that are this process, and have GPUs while they work."""
    backend = Calls()

    def there(function):
        def call(*arguments, **named):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(jax, "default_backend", lambda: "gpu")
                return function(*arguments, **named)

        return call

    monkeypatch.setattr(durable, "open_backend", backend.opened)
    monkeypatch.setattr(durable, "begin", there(durable.begin))
    monkeypatch.setattr(workers, "train_batch", there(workers.train_batch))
    return backend


@pytest.mark.exhaustive
def test_workers_settle_it_and_not_who_hands_them_work(trained_on, gpu_workers, tmp_path):
    durable.run(parse(FEW), tmp_path / "run", gpu_workers)
    assert [call for call, _ in gpu_workers.made][:2] == ["jaxaudit.runs.lifecycle:begin", workers.TRAIN_BATCH]
    assert jax.default_backend() == "cpu"
    assert physics(tmp_path / "run") == "mjx"
    assert {task.physics for task in trained_on} == {"mjx"}


def test_workers_do_not_leave_it_for_what_they_have(begun, gpu_workers):
    with pytest.raises(UserError, match="begun with physics 'c' and needs it, and here, where JAX runs on 'gpu'"):
        durable.resume(begun, gpu_workers)


def test_an_earlier_versions_auto_is_what_its_devices_had(copied, capsys):
    stored_as(copied, "auto", "cpu")
    assert open_run(copied)[1].task.physics == "c"
    assert replay(copied).equal
    stored_as(copied, "auto", "NVIDIA H200")
    assert open_run(copied)[1].task.physics == "mjx"
    told = replay(copied)
    assert told.equal
    assert told.differences == (("device_kind", "NVIDIA H200", "cpu"),)
    assert physics(copied) == "auto", "what is stored stays"


@pytest.mark.parametrize("stored", ["c", "auto"])
@pytest.mark.parametrize("command", ["resume", "fork", "replay", "margin"])
def test_c_mujoco_is_not_left_for_mjx(stored, command, copied, here, on_a_gpu):
    stored_as(copied, stored)
    if command == "resume":
        Folder(copied).update_environment(status="interrupted")
    before = contents(copied)
    (copied.parent / "spec.toml").write_text(FEW)
    given = [copied.parent / "spec.toml", "-o", copied.parent / "fork"] if command == "fork" else []
    done = here(command, copied, *given)
    words = (
        "was begun with physics 'c' and needs it, and here, where JAX runs on 'gpu', physics would be 'mjx': ",
        "set JAX_PLATFORMS=cpu",
        "or run its spec again in another folder",
    )
    one_sentence(done, 2, *words)
    assert contents(copied) == before
    assert {path.name for path in copied.parent.iterdir()} == {"run", "spec.toml"}


@pytest.mark.parametrize("stored", ["mjx", "auto"])
def test_mjx_goes_on_where_there_is_no_gpu(stored, begun, trained_on):
    """A GPU's run is gone on with and replayed in the engine that it has, and never in another one."""
    stored_as(begun, stored, "NVIDIA H200")
    trained_on.clear()
    durable.resume(begun)
    assert replay(begun).equal
    assert {task.physics for task in trained_on} == {"mjx"}


def test_a_fork_has_the_engine_of_its_run(copied, tmp_path):
    stored_as(copied, "mjx", "NVIDIA H200")
    durable.fork(copied, parse(FEW), tmp_path / "fork")
    assert physics(tmp_path / "fork") == "mjx"
    with pytest.raises(UserError, match=r"must keep the run's task \(physics 'mjx', not 'c'\)$"):
        durable.fork(copied, parse(spec_of("c")), tmp_path / "other")
    other = parse(spec_of("c").replace("seeds = 3", "seeds = 2"))
    with pytest.raises(UserError, match=r"must keep the run's task \(physics 'mjx', not 'c'\) and seeds$"):
        durable.fork(copied, other, tmp_path / "other")
    assert not (tmp_path / "other").exists()


@pytest.mark.exhaustive
def test_an_earlier_versions_run_is_forked_with_the_engine_it_had(copied, tmp_path):
    stored_as(copied, "auto")
    durable.fork(copied, parse(spec_of("c")), tmp_path / "fork")
    assert physics(tmp_path / "fork") == "c"


def test_a_plan_is_taken_with_its_engine(copied, tmp_path):
    stored_as(copied, "mjx", "NVIDIA H200")
    durable.run(parse(FEW), tmp_path / "again", like=copied)
    assert physics(tmp_path / "again") == "mjx"
    with pytest.raises(UserError, match=r"to take the plan of .*run, the spec must keep its task \(physics 'mjx', not"):
        durable.run(parse(spec_of("c")), tmp_path / "other", like=copied)


def test_runs_of_one_engine_are_compared_together_whoever_stored_them():
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
