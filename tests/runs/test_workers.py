"""The driver that hands out a run's batches, with workers that are this process, and vanish where a test says so."""

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
"""Two batches of the baseline, of 5 chunks, and six of the fork group, of 3."""


class Gone(BaseException):
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
class Here:
    """Two workers; of each batch, after how many chunks its workers vanish, one after the other.

    `silent` batches are trained, and nobody says so.
    """

    vanish: dict[int, list[int]] = field(default_factory=dict)
    silent: tuple[int, ...] = ()
    workers: int = 2
    workers_per_machine: int = 2
    handed: list[int] = field(default_factory=list)
    left: int | None = None

    def submit(self, call, arguments):
        if call.endswith(":begin"):
            return Job(-1, self._performed(durable.begin, arguments))
        number = arguments["number"]
        self.handed.append(number)
        onsets = [*Path(arguments["folder"], "checkpoints").glob("onset-*")]
        assert number < 2 or len(onsets) == 2, "a fork begins from states that stay where they are"
        chunks = self.vanish.get(number)
        self.left = chunks.pop(0) if chunks else None
        ended = self._performed(train_batch, arguments)
        return Job(number, None if number in self.silent else ended)

    def _performed(self, function, arguments):
        try:
            function(**arguments)
        except Gone:
            return CallResult(lost="gone")
        except Exception as error:
            code, sentence = explain(error)
            return CallResult(error=sentence, code=code)
        return CallResult()

    def advance(self, engine, *arguments):
        if self.left == 0:
            raise Gone
        self.left = None if self.left is None else self.left - 1
        return ADVANCE(engine, *arguments)


ADVANCE = Engine.advance


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole") / "run"
    durable.run(parse(BATCHES), folder)
    return folder


@pytest.fixture
def run(tmp_path, reference, monkeypatch):
    """Runs by a backend, or goes on with a run."""

    def train(backend, go_on=False):
        monkeypatch.setattr(durable, "open_backend", lambda *_: contextlib.nullcontext(backend))
        monkeypatch.setattr(Engine, "advance", lambda *arguments: backend.advance(*arguments))
        if go_on:
            durable.resume(tmp_path / "run", "this process")
        else:
            durable.run(parse(BATCHES), tmp_path / "run", "this process", like=reference)
        return tmp_path / "run"

    return train


@pytest.mark.exhaustive
def test_the_baseline_is_first_and_forks_as_soon_as_they_can(run, reference):
    backend = Here()
    assert_runs_equal(run(backend), reference)
    assert backend.handed == list(range(8))


def test_workers_that_vanish_are_followed_by_others_that_go_on(run, reference, capsys):
    backend = Here(vanish={0: [2, 2], 4: [0, 1]})
    assert_runs_equal(folder := run(backend), reference)
    told = read_shards(folder)
    assert backend.handed[:3] == [0, 1, 0]
    assert told[told.batch == 0].from_step.tolist() == [0, 8, 12]
    assert told[told.batch == 4].from_step.tolist() == [10, 10, 12]
    assert told[told.batch == 4].outcome.tolist() == ["lost", "lost", "complete"]
    assert "note: batch 0 lost its worker after step 8 (gone)" in capsys.readouterr().err


@pytest.mark.exhaustive
def test_two_that_vanish_in_the_same_chunk_are_enough_and_another_run_can_go_on(run, reference):
    with pytest.raises(Failed, match=r"batch 3 lost its worker twice after step 12 \(gone\), so it is given up; go on"):
        run(Here(vanish={3: [1, 0]}))
    backend = Here()
    assert_runs_equal(run(backend, go_on=True), reference)
    assert 0 not in backend.handed


@pytest.mark.exhaustive
def test_one_taken_for_lost_that_ends_first_is_accepted(run, reference):
    """A worker that nobody hears of, whose attempt is complete."""
    backend = Here(silent=(1, 5))
    assert_runs_equal(run(backend), reference)


@pytest.mark.exhaustive
def test_a_full_disk_of_a_worker_is_told_and_the_run_goes_on(run, reference, monkeypatch):
    def full(*arguments):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(BatchAttempt, "write_rows", full)
        with pytest.raises(Failed, match="the disk is full"):
            run(Here())
    assert_runs_equal(run(Here(), go_on=True), reference)


def test_what_calls_return_comes_as_they_end():
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
    always = Echo()
    always.lost = 2
    with pytest.raises(Failed, match=r"a worker was lost twice \(gone\)"):
        list(run_calls(always, [("b", {})]))


def test_states_of_an_onset_are_those_of_its_whole_name(tmp_path, monkeypatch):
    """What an attempt has not handed over yet can be read, but may be moved, so nothing is begun from it."""
    store, name = Folder(tmp_path), "onset-10000000"
    held = {name: {0}, f"{name}-0001": {1}, "onset-100000000": {2}, f"{name}-0002": {3}}
    places = [store.checkpoints / n for n in list(held)[:3]] + [store.batches / "0002" / "attempt-001" / f"{name}-0002"]
    for place in places:
        place.mkdir(parents=True)
    monkeypatch.setattr(checkpoint, "lanes", lambda path: held[path.name])
    assert seeds_at_onset(store, 10_000_000) == {0, 1}
    assert seeds_at_onset(store, 100_000_000) == {2}
    assert onset_paths(store, 10_000_000, [0, 3]) == [places[0], places[3]]
