"""The driver that distributes a run's batches, with workers in this process that vanish at the tests' request."""

import contextlib
import errno
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from small_runs import SHORT_SPEC, assert_runs_equal
from worker_runs import read_shards

from jaxaudit.execution.engine import Engine
from jaxaudit.runs import checkpoint
from jaxaudit.runs import lifecycle as durable
from jaxaudit.runs.attempts import BatchAttempt, onset_paths, seeds_at_onset
from jaxaudit.runs.run_folder import Folder
from jaxaudit.runs.workers import train_batch
from jaxaudit.runtime.backends import CallResult, run_calls
from jaxaudit.runtime.errors import Failed, UserError, explain
from jaxaudit.spec.document import parse

pytestmark = pytest.mark.default_compilation

BATCHES = SHORT_SPEC.replace("steps = 20", "steps = 20\nlanes = 2")
"""The baseline has two batches of 5 chunks, and the fork group six of 3."""


class WorkerVanished(BaseException):
    pass


@dataclass
class Job:
    number: int
    end: CallResult | None = None

    def poll(self):
        return self.end

    def cancel(self):
        self.end = self.end or CallResult(lost="cancelled")


@dataclass
class VanishingBackend:
    """A backend with two workers in this process.

    Attributes:
      vanish: By batch, the numbers of chunks after which its successive workers vanish.
      silent: The batches that are trained without a report of the result.
    """

    vanish: dict[int, list[int]] = field(default_factory=dict)
    silent: tuple[int, ...] = ()
    workers: int = 2
    workers_per_machine: int = 2
    submitted: list[int] = field(default_factory=list)
    chunks_left: int | None = None

    def submit(self, call, arguments):
        if call.endswith(":begin"):
            return Job(-1, self._performed(durable.begin, arguments))
        number = arguments["number"]
        self.submitted.append(number)
        onsets = [*Path(arguments["folder"], "checkpoints").glob("onset-*")]
        assert number < 2 or len(onsets) == 2, "a fork began before the onset's states were in their final place"
        chunks = self.vanish.get(number)
        self.chunks_left = chunks.pop(0) if chunks else None
        result = self._performed(train_batch, arguments)
        return Job(number, None if number in self.silent else result)

    def _performed(self, function, arguments):
        try:
            function(**arguments)
        except WorkerVanished:
            return CallResult(lost="gone")
        except Exception as error:
            code, sentence = explain(error)
            return CallResult(error=sentence, code=code)
        return CallResult()

    def advance(self, engine, *arguments):
        if self.chunks_left == 0:
            raise WorkerVanished
        self.chunks_left = None if self.chunks_left is None else self.chunks_left - 1
        return ADVANCE(engine, *arguments)


ADVANCE = Engine.advance


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole") / "run"
    durable.run(parse(BATCHES), folder)
    return folder


@pytest.fixture
def run(tmp_path, reference, monkeypatch):
    """Returns a function that runs the spec with a backend, or resumes the run."""

    def train(backend, resume=False):
        monkeypatch.setattr(durable, "open_backend", lambda *_: contextlib.nullcontext(backend))
        monkeypatch.setattr(Engine, "advance", lambda *arguments: backend.advance(*arguments))
        if resume:
            durable.resume(tmp_path / "run", "this process")
        else:
            durable.run(parse(BATCHES), tmp_path / "run", "this process", like=reference)
        return tmp_path / "run"

    return train


@pytest.mark.exhaustive
def test_the_baseline_is_first_and_forks_follow_as_soon_as_possible(run, reference):
    backend = VanishingBackend()
    assert_runs_equal(run(backend), reference)
    assert backend.submitted == list(range(8))


@pytest.mark.exhaustive
def test_workers_that_vanish_are_replaced_from_the_stored_states(run, reference, capsys):
    backend = VanishingBackend(vanish={0: [2, 2], 4: [0, 1]})
    assert_runs_equal(folder := run(backend), reference)
    shards = read_shards(folder)
    assert backend.submitted[:3] == [0, 1, 0]
    assert shards[shards.batch == 0].from_step.tolist() == [0, 8, 12]
    assert shards[shards.batch == 4].from_step.tolist() == [10, 10, 12]
    assert shards[shards.batch == 4].outcome.tolist() == ["lost", "lost", "complete"]
    assert "note: batch 0 lost its worker after step 8 (gone)" in capsys.readouterr().err


@pytest.mark.exhaustive
def test_two_workers_that_vanish_in_one_chunk_end_the_run(run, reference):
    with pytest.raises(Failed, match=r"batch 3 lost its worker twice after step 12 \(gone\), so it is given up; go on"):
        run(VanishingBackend(vanish={3: [1, 0]}))
    backend = VanishingBackend()
    assert_runs_equal(run(backend, resume=True), reference)
    assert 0 not in backend.submitted


@pytest.mark.exhaustive
def test_a_complete_attempt_of_an_unreported_worker_is_accepted(run, reference):
    """The driver hears nothing from a worker whose attempt is complete."""
    backend = VanishingBackend(silent=(1, 5))
    assert_runs_equal(run(backend), reference)


@pytest.mark.exhaustive
def test_a_full_disk_of_a_worker_is_reported_and_the_run_resumes(run, reference, monkeypatch):
    def no_space(*arguments):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(BatchAttempt, "write_rows", no_space)
        with pytest.raises(Failed, match="the disk is full"):
            run(VanishingBackend())
    assert_runs_equal(run(VanishingBackend(), resume=True), reference)


def test_results_of_calls_arrive_as_the_calls_end():
    class Echo:
        workers = 2
        lost = 1

        def submit(self, call, arguments):
            if call == "b" and self.lost:
                self.lost -= 1
                return Job(0, CallResult(lost="gone"))
            return Job(0, CallResult(value=call, **arguments))

    assert sorted(run_calls(Echo(), [("a", {}), ("b", {}), ("c", {})])) == [(0, "a"), (1, "b"), (2, "c")]
    with pytest.raises(UserError, match="no"):
        list(run_calls(Echo(), [("a", {"error": "no", "code": 2})]))
    loses_twice = Echo()
    loses_twice.lost = 2
    with pytest.raises(Failed, match=r"a worker was lost twice \(gone\)"):
        list(run_calls(loses_twice, [("b", {})]))


def test_states_of_an_onset_are_matched_by_the_entire_name(tmp_path, monkeypatch):
    """States that an attempt still has can be read but may be moved, so that nothing begins from them."""
    store, name = Folder(tmp_path), "onset-10000000"
    seeds_by_name = {name: {0}, f"{name}-0001": {1}, "onset-100000000": {2}, f"{name}-0002": {3}}
    paths = [store.checkpoints / n for n in list(seeds_by_name)[:3]] + [
        store.batches / "0002" / "attempt-001" / f"{name}-0002"
    ]
    for path in paths:
        path.mkdir(parents=True)
    monkeypatch.setattr(checkpoint, "lanes", lambda path: seeds_by_name[path.name])
    assert seeds_at_onset(store, 10_000_000) == {0, 1}
    assert seeds_at_onset(store, 100_000_000) == {2}
    assert onset_paths(store, 10_000_000, [0, 3]) == [paths[0], paths[3]]
