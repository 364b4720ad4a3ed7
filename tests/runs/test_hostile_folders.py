"""A run's folder of unknown origin runs no code, changes nothing outside, and takes no more memory than declared."""

import hashlib
import json
import os
import pickle
import shutil
import struct
import sys
import zipfile
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import zarr
from markupsafe import escape
from numcodecs import pickles
from small_runs import SPEC

from jaxaudit.analysis.run_reader import load
from jaxaudit.cli import main as cli
from jaxaudit.monitoring.monitor import Monitor
from jaxaudit.report import build, page
from jaxaudit.runs import checkpoint
from jaxaudit.runs import lifecycle as durable
from jaxaudit.runs.disk_sink import FolderSink
from jaxaudit.runs.replay import replay
from jaxaudit.runs.run_folder import Folder
from jaxaudit.runtime import array_store, files
from jaxaudit.runtime.errors import DrawingFailed, UserError
from jaxaudit.spec.document import parse


@pytest.fixture(scope="module")
def trained_folders(tmp_path_factory):
    """A finished run, and a copy of its folder after 10 chunks."""
    root = tmp_path_factory.mktemp("made")

    def reached(self, *arguments, original=FolderSink.reached):
        original(self, *arguments)
        if self._progress.chunks_done == 10 and not (root / "stopped").exists():
            shutil.copytree(self.store.path, root / "stopped")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FolderSink, "reached", reached)
        durable.run(parse(SPEC), root / "run")
    return root


@pytest.fixture
def run(trained_folders, tmp_path):
    return shutil.copytree(trained_folders / "run", tmp_path / "run")


@pytest.fixture
def stopped(trained_folders, tmp_path):
    return shutil.copytree(trained_folders / "stopped", tmp_path / "stopped")


class Payload:
    """An object that creates a file when it is unpickled."""

    def __init__(self, path):
        self._path = path

    def __reduce__(self):
        return Path.touch, (self._path,)


@pytest.fixture
def payload(tmp_path):
    """An object that must not be unpickled. The test fails if it was."""
    yield Payload(tmp_path / "harm")
    assert not (tmp_path / "harm").exists(), "the payload was unpickled"


def assert_refused(words, function, *arguments, **settings):
    with pytest.raises(UserError, match=words):
        function(*arguments, **settings)


def edit_json(path, change):
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))


def test_the_payload_creates_a_file_when_unpickled(tmp_path):
    pickle.loads(pickle.dumps(Payload(tmp_path / "harm")))
    assert (tmp_path / "harm").exists()


@pytest.mark.exhaustive
@pytest.mark.parametrize("codec", ["filters", "v3"])
def test_a_pickle_in_telemetry_is_not_unpickled(codec, run, payload, monkeypatch):
    """Numcodecs before 0.16.6 unpickles on request of a store of format 2.

    The setting makes this version do the same.
    """
    monkeypatch.setattr(pickles, "ALLOW_UNSAFE_PICKLE_DECODE", True)
    path = run / "telemetry.zarr" / "performance"
    if codec == "v3":
        edit_json(
            path / "zarr.json", lambda array: array.update(codecs=[{"name": "numcodecs.pickle", "configuration": {}}])
        )
        words = r"'performance' is coded by \['numcodecs.pickle'\]"
    else:
        shutil.rmtree(run / "telemetry.zarr")
        path.mkdir(parents=True)
        array = {"shape": [1], "chunks": [1], "dtype": "|O", "compressor": None, "fill_value": 0, "order": "C"}
        filters = [{"id": "vlen-utf8"}, {"id": "pickle"}]
        (path / ".zarray").write_text(json.dumps(array | {"zarr_format": 2, "filters": filters}))
        (path / ".zattrs").write_text(json.dumps({"_ARRAY_DIMENSIONS": ["step"]}))
        (path / "0").write_bytes(pickle.dumps(payload))
        (path.parent / ".zgroup").write_text('{"zarr_format": 2}')
        words = "it is not a zarr store of format 3"
    for command in (load, replay, durable.resume):
        assert_refused(words, command, run)


def savez(path, **arrays):
    with path.open("wb") as file:
        np.savez(file, **arrays)


def test_a_pickle_in_an_archive_is_not_unpickled(payload, stopped, tmp_path):
    savez(tmp_path / "monitor.npz", description=np.array([payload], object))
    assert_refused("Python objects, which are never unpickled", array_store.read_npz, tmp_path / "monitor.npz")
    with pytest.raises(ValueError, match="is not a monitor's file"):
        Monitor.load(tmp_path / "monitor.npz")
    for rows in stopped.glob("batches/*/*/rows-*.npz"):
        savez(rows, performance=np.array([payload], object))
    assert_refused("never unpickled", durable.resume, stopped)


def test_archives_are_read_as_by_numpy(tmp_path):
    rng = np.random.default_rng(0)
    arrays = {
        "a": rng.normal(size=(3, 4)),
        "b/c": np.asfortranarray(rng.integers(0, 9, (2, 3))),
        "empty": np.zeros((0, 3), np.float32),
        "text": np.array("words"),
        "scalar": np.float32(1.5),
        "flags": np.array([True, False]),
    }
    savez(tmp_path / "a.npz", **arrays)
    loaded = array_store.read_npz(tmp_path / "a.npz")
    assert loaded.keys() == arrays.keys()
    for name, array in arrays.items():
        np.testing.assert_array_equal(loaded[name], array)
        assert loaded[name].dtype == np.asarray(array).dtype


def write_compressed(path):
    np.savez_compressed(path, clean=np.zeros(10**6))


def write_overlapping(path):
    """Writes an archive that lists a member a hundred times."""
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("a.npy", bytes(10**5))
        file.filelist += file.filelist * 99


def write_too_short(path):
    with zipfile.ZipFile(path, "w") as file, file.open("a.npy", "w") as member:
        np.lib.format.write_array_header_1_0(member, {"descr": "<f8", "fortran_order": False, "shape": (10**12,)})


def write_truncated(path):
    savez(path, a=np.zeros(1000))
    path.write_bytes(path.read_bytes()[:4000])


def write_no_array(path):
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("a.npy", b"nothing")


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (write_compressed, "a member is compressed"),
        (write_overlapping, "its members are longer than the file"),
        (write_too_short, "not as long as its header says"),
        (write_truncated, "is damaged"),
        (write_no_array, "is damaged"),
        (lambda path: os.mkfifo(path), "is not a file"),
        (lambda path: path.mkdir(), "is not a file"),
    ],
)
def test_malformed_archives_are_refused(make, words, tmp_path):
    make(tmp_path / "a.npz")
    assert_refused(words, array_store.read_npz, tmp_path / "a.npz")


def zstd_frame(size, *, complete=True):
    """Returns a Zstandard frame that inflates to `size` zeros, by blocks that repeat one byte (RFC 8878)."""
    block = 2**17
    count = size // block
    blocks = [((complete and n == count - 1) | 1 << 1 | block << 3).to_bytes(3, "little") + b"\0" for n in range(count)]
    return b"\x28\xb5\x2f\xfd" + bytes([0b11100000]) + struct.pack("<Q", count * block) + b"".join(blocks)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (zstd_frame(2**31), "inflates to 2 GiB"),
        (zstd_frame(2**17) * 2, "goes on after its end"),
        (zstd_frame(2**17, complete=False), "ends before its end"),
        (b"\x28\xb5\x2f\xfd\x00\x58" + b"\x01\x00\x00", "does not say what it inflates to"),
        (b"plain", "not compressed by Zstandard"),
        (b"", "not compressed by Zstandard"),
    ],
)
@pytest.mark.parametrize("array", ["performance/c/0/0/0", "condition/c/0"])
def test_chunks_that_inflate_too_far_are_refused(content, words, array, run):
    (run / "telemetry.zarr" / array).write_bytes(content)
    assert_refused(words, load, run)


def test_many_text_chunks_that_inflate_are_refused(run):
    for number in range(3):
        (run / "telemetry.zarr/condition/c" / str(number)).write_bytes(zstd_frame(30 * 2**20))
    assert_refused("the chunks of condition inflate to more than 64 MiB", load, run)


def test_the_declared_size_of_a_frame_is_what_numcodecs_decodes(tmp_path):
    from numcodecs import Zstd

    rng = np.random.default_rng(0)
    for size in (0, 1, 255, 256, 65_535, 65_792, 10**6, 5 * 10**6):
        for content in (bytes(size), rng.bytes(size)):
            (tmp_path / "chunk").write_bytes(encoded := Zstd(level=0).encode(content))
            with (tmp_path / "chunk").open("rb") as file:
                assert array_store._decompressed_bytes(file, len(encoded)) == size
    (tmp_path / "chunk").write_bytes(encoded := Zstd(level=3, checksum=True).encode(bytes(1000)))
    with (tmp_path / "chunk").open("rb") as file:
        assert array_store._decompressed_bytes(file, len(encoded)) == 1000
    assert len(Zstd().decode(zstd_frame(2**20))) == 2**20, "the frames above do not inflate as intended"


def change_all_arrays(store, change):
    """Changes the metadata of every array, both beside the array and in the root."""

    def change_both(value):
        for array in (value.get("consolidated_metadata") or {"metadata": {"": value}})["metadata"].values():
            if array["node_type"] == "array":
                change(array)

    for path in store.rglob("zarr.json"):
        edit_json(path, change_both)


def enlarge(array):
    array["shape"] = [10**6 if name in ("seed", "condition", "step") else 1 for name in array["dimension_names"]]


def point_outside(store):
    edit_json(store / "zarr.json", lambda root: root["consolidated_metadata"]["metadata"].update({"../x": {}}))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda store: change_all_arrays(store, enlarge), r"takes .* TiB in memory"),
        (lambda store: change_all_arrays(store, lambda a: a.update(data_type="object")), "has values of type 'object'"),
        (lambda store: change_all_arrays(store, lambda a: a.pop("shape")), "metadata are incomplete"),
        (lambda store: change_all_arrays(store, lambda a: a.update(shape=[-1] * len(a["shape"]))), "has the shape"),
        (lambda store: change_all_arrays(store, lambda a: a.update(shape=["x"] * len(a["shape"]))), "has the shape"),
        (
            lambda store: change_all_arrays(
                store, lambda a: a["chunk_grid"]["configuration"].update(chunk_shape=[10**9] * len(a["shape"]))
            ),
            "larger than its shape",
        ),
        (
            lambda store: edit_json(store / "performance" / "zarr.json", lambda a: a.update(shape=[9, 9, 9])),
            "differ|larger",
        ),
        (point_outside, "name arrays that it does not have"),
        (
            lambda store: edit_json(store / "zarr.json", lambda root: root.update(node_type="array")),
            "root is not a group",
        ),
        (lambda store: edit_json(store / "zarr.json", lambda root: root.update(consolidated_metadata=7)), "incomplete"),
        (lambda store: (store / "zarr.json").write_text("[]"), "is not a JSON object"),
        (lambda store: shutil.rmtree(store / "performance"), "does not have"),
    ],
)
def test_malformed_stores_are_refused(change, words, run):
    change(run / "telemetry.zarr")
    assert_refused(words, load, run)
    assert_refused(words, replay, run)


def test_an_unchanged_store_is_accepted(run):
    array_store.check(run / "telemetry.zarr")
    assert load(run).performance.shape == (3, 8, 20)


def replace_by_link(path, target):
    target.write_text("theirs")
    path.unlink(missing_ok=True)
    path.symlink_to(target)


@pytest.mark.parametrize(
    "name", ["figures/performance.svg", "report.html", "environment.json", ".unfinished-environment.json", "spec.toml"]
)
def test_links_in_a_runs_folder_are_refused(name, run, stopped, tmp_path, capsys):
    for folder in (run, stopped):
        (folder / name).parent.mkdir(exist_ok=True)
        content = (folder / name).read_text() if (folder / name).exists() else ""
        replace_by_link(folder / name, tmp_path / "theirs")
        (tmp_path / "theirs").write_text(content)
        for command in ("report", "resume", "replay", "sample"):
            assert cli.main([command, str(folder)]) == 2
            assert "is a link, and a run's folder may not have links inside" in capsys.readouterr().err
        assert (tmp_path / "theirs").read_text() == content
        assert (folder / name).is_symlink()


def test_nothing_is_removed_from_linked_telemetry(stopped, tmp_path):
    (stopped / "telemetry.zarr").rename(tmp_path / "elsewhere")
    (tmp_path / "elsewhere" / "mine.partial").write_text("mine")
    (stopped / "telemetry.zarr").symlink_to(tmp_path / "elsewhere")
    assert_refused("is a link", durable.resume, stopped)
    assert (tmp_path / "elsewhere" / "mine.partial").read_text() == "mine"


def widen(plan):
    for batch in plan["batches"]:
        batch["width"] = 10**9


@pytest.mark.parametrize(
    "change",
    [
        widen,
        lambda plan: plan["batches"].pop(),
        lambda plan: plan["batches"].append(plan["batches"][-1]),
        lambda plan: plan["batches"][1]["lanes"].reverse(),
        lambda plan: plan["batches"][1].update(stop=10**6),
        lambda plan: plan["batches"][1].update(onset=-1),
        lambda plan: plan["batches"][1].update(fork=99),
        lambda plan: plan["batches"][1].update(fork="0"),
        lambda plan: plan["batches"][1].update(width=True),
        lambda plan: plan["batches"][1].update(lanes=[[0, 10**30]]),
        lambda plan: plan.update(batches=None),
        lambda plan: plan.update(batches=[3]),
    ],
)
def test_malformed_plans_are_refused(change, run, stopped):
    edit_json(stopped / "plan.json", change)
    assert_refused("plan.json is damaged: it is no plan of the run's lanes", durable.resume, stopped)
    edit_json(run / "plan.json", change)
    assert_refused("plan.json is damaged", replay, run)


def set_pieces(folder, pieces):
    for path in folder.rglob("digest.json"):
        content = json.loads(path.read_text()) | {"pieces": pieces}
        content.pop("digest")
        digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
        path.write_text(json.dumps(content | {"digest": digest}))


@pytest.mark.parametrize(
    "pieces",
    [
        *([], [[0, 10**9]], [[0, 0]], [[-3, 3]], [[0, True]], [["0", 3]], [[0, 3, 3]], 7),
        pytest.param([[0, 2**24]], marks=pytest.mark.exhaustive),
    ],
)
def test_checkpoints_of_other_lanes_are_refused(pieces, run):
    set_pieces(run, pieces)
    assert_refused(r"checkpoint .* is (damaged|without)", replay, run, condition="1")


def test_malformed_checkpoint_arrays_end_in_one_sentence(run, capfd):
    for path in run.rglob("manifest.ocdbt"):
        path.write_bytes(os.urandom(200))
    for path in run.rglob("digest.json"):
        content = json.loads(path.read_text())
        content["files"] = {
            name: hashlib.sha256((path.parent / name).read_bytes()).hexdigest() for name in content["files"]
        }
        content.pop("digest")
        digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
        path.write_text(json.dumps(content | {"digest": digest}))
    assert cli.main(["replay", str(run), "--condition", "1"]) == 2
    lines = capfd.readouterr().err.splitlines()
    assert len(lines) == 1
    assert "is damaged" in lines[0]


def test_tensorstores_reports_to_closed_loops_are_not_printed(monkeypatch):
    errors = []
    monkeypatch.setattr("sys.unraisablehook", lambda unraisable: errors.append(unraisable.exc_value))
    checkpoint._ignore_reports_to_closed_loops.__wrapped__()
    others = [RuntimeError("another"), ValueError("Event loop is closed")]
    for error in [RuntimeError("Event loop is closed"), *others]:
        sys.unraisablehook(SimpleNamespace(exc_value=error))
    assert errors == others


def test_checkpoints_that_do_not_fit_in_memory_are_refused(run, monkeypatch):
    monkeypatch.setattr(checkpoint, "available_host_memory", lambda: 10)
    assert_refused(r"needs .* in memory, and 10 B are available", replay, run, condition="1")


@pytest.mark.parametrize(
    "facts",
    [
        {"devices": "many"},
        {"gathered": "all"},
        {"gathered": [None]},
        {"packages": 5},
        {"wall_seconds": "long"},
        {"lane_layout": {"execution": "fast"}},
        {"lane_layout": {"execution": []}},
        {"jaxaudit": 2},
        {"remarks": "so"},
        {"provenance": []},
        {"resumed_with": "x"},
    ],
)
def test_malformed_environments_are_refused(facts, run):
    edit_json(run / "environment.json", lambda environment: environment.update(facts))
    assert_refused("environment.json is damaged", load, run)
    assert_refused("environment.json is damaged", replay, run)


def test_steps_and_seeds_are_bounded(run):
    for text, words in (
        (SPEC.replace("seeds = 3", "seeds = 1000000"), "seeds must be from 1 to 100000"),
        (SPEC.replace("seeds = 3", f"seeds = {list(range(100_001))}"), "at most 100000 seeds"),
        (SPEC.replace("steps = 20", "steps = 200000000"), "steps must be from 1 to 10000000"),
        (SPEC.replace("window = 4", "window = 2147483647"), "window must be from 1 to 10000000"),
        (
            SPEC + 200 * ("[[perturbation]]\nkind = 'weight_noise'\nmagnitude = " + str(list(range(1, 1001))) + "\n"),
            "a spec may have at most 100000 conditions",
        ),
    ):
        assert_refused(words, parse, text)
    spec = run / "spec.toml"
    spec.write_text(spec.read_text().replace("steps = 20", "steps = 200000000"))
    assert_refused("steps must be from 1 to 10000000", replay, run)


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("metrics", lambda t: t.drop(columns="collapse_time"), "no column 'collapse_time'"),
        ("metrics", lambda t: t.iloc[:3], "its rows are not those"),
        ("metrics", lambda t: t.assign(seed="zzz"), "its rows are not those"),
        ("summary", lambda t: t.assign(condition="zzz"), "its rows are not those"),
        ("summary", lambda t: t.assign(magnitude="1e308"), "its magnitudes are not those"),
        ("summary", lambda t: t.assign(collapse_probability="-1"), r"a probability outside of \[0, 1\]"),
    ],
)
def test_tables_of_other_lanes_are_refused(name, change, words, run):
    path = run / f"{name}.csv"
    change(pd.read_csv(path, keep_default_na=False, dtype=str)).to_csv(path, index=False)
    assert_refused(words, load, run)


def test_names_are_escaped_in_a_report(run, monkeypatch):
    """The names are those of the audit, of a channel, and of a perturbation and its conditions."""
    payload = "</script><script>a()</script><img src=x onerror=a()>'\"{{7*7}}"
    store, channel = run / "telemetry.zarr", payload.replace("/", "|")
    spec = (run / "spec.toml").read_text()
    (run / "spec.toml").write_text(spec.replace('"small"', json.dumps(payload)))
    (store / "x_inst").rename(store / channel)

    def rename(root):
        arrays = root["consolidated_metadata"]["metadata"]
        arrays[channel] = arrays.pop("x_inst")

    edit_json(store / "zarr.json", rename)
    for name in ("condition", "perturbation"):
        labels = array_store.open_array(store / name, "r+")
        labels[:] = np.array([str(label).replace("weight_noise", payload) for label in labels[:]], object)
    for name in ("metrics", "summary"):
        table = pd.read_csv(run / f"{name}.csv", keep_default_na=False, dtype=str)
        for column in ("condition", "perturbation"):
            table[column] = table[column].str.replace("weight_noise", payload)
        table.to_csv(run / f"{name}.csv", index=False)
    monkeypatch.setattr("jaxaudit.report.page.write_figures", lambda *_: None)
    monkeypatch.setattr("jaxaudit.report.page.script", lambda: "")
    tags = []

    class Tags(HTMLParser):
        def handle_starttag(self, tag, attrs):
            tags.append((tag, dict(attrs)))

    page = build(run).read_text()
    assert str(escape(payload)) in page
    Tags().feed(page)
    scripts = [attrs.get("id", "") for tag, attrs in tags if tag == "script"]
    assert scripts.count("") == 2  # the bundle's and the page's script
    assert all(name.startswith("spec-") for name in scripts if name)
    assert "img" not in {tag for tag, _ in tags}
    assert not [name for _, attrs in tags for name in attrs if name.startswith("on")]


@pytest.mark.parametrize("content", [b"a\xff,b\n1,2\n", b'seed\n"1,2\n'])
def test_malformed_tables_are_refused(content, run):
    (run / "metrics.csv").write_bytes(content)
    assert_refused("metrics.csv is damaged", load, run)


@pytest.mark.exhaustive
def test_a_failure_to_draw_is_one_sentence_and_the_run_is_kept(run, monkeypatch, tmp_path, capsys):
    (tmp_path / "dies.py").write_text("import os, signal; os.kill(os.getpid(), signal.SIGTRAP)")
    (tmp_path / "fails.py").write_text("raise RuntimeError('no font')")
    page.script.cache_clear()
    for program, words in (
        ("dies", "the process that draws figures was ended by SIGTRAP: is the machine out of memory?"),
        ("fails", "the process that draws figures failed (RuntimeError: no font)"),
    ):
        monkeypatch.setattr(page, "PROGRAM", tmp_path / f"{program}.py")
        assert cli.main(["report", str(run)]) == 1
        assert capsys.readouterr().err == f"jaxaudit: {words}\n"
        assert cli._report_finished(run) == 0
        assert capsys.readouterr().err == (
            f"note: the run is finished and stored in {run}, but its report was not drawn: {words}; draw it "
            f"later with: jaxaudit report {run}\n"
        )
    assert not (run / "report.html").exists()
    assert not [path for path in run.iterdir() if path.name.startswith(".")]
    with pytest.raises(DrawingFailed):
        page.script()


def test_characters_that_figures_cannot_contain_are_replaced(tmp_path):
    title = "a\x1b[31m\x00\uffff \\u001b <b> \N{GREEK SMALL LETTER ALPHA}"
    spec = {"data": {"values": [{"x": 1}]}, "mark": "point", "title": title, "encoding": {"x": {"field": "x"}}}
    page._draw(tmp_path, [{"file": "figure", "spec": spec}])
    assert (
        "a\ufffd[31m\ufffd\ufffd \\u001b &lt;b&gt; \N{GREEK SMALL LETTER ALPHA}"
        in (tmp_path / "figure.svg").read_text()
    )
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")


def test_figures_of_earlier_reports_are_removed(run, monkeypatch):
    (run / "figures").mkdir(exist_ok=True)
    for name in ("earlier.svg", "earlier.png", "mine.png", "mine.txt"):
        (run / "figures" / name).write_text("x")
    monkeypatch.setattr(
        page, "_draw", lambda folder, figures: [(folder / n).write_text("new") for n in ("a.svg", "a.png")]
    )
    page.write_figures(run / "figures", [])
    assert sorted(os.listdir(run / "figures")) == ["a.png", "a.svg", "mine.png", "mine.txt"]


def test_unfinished_figures_of_killed_processes_are_removed(run, monkeypatch):
    of_killed, in_progress, of_this_process = (run / f".unfinished-{n}-figures" for n in (1, 2, os.getpid()))
    for folder in (of_killed, in_progress, of_this_process):
        folder.mkdir()
        (folder / "half.svg").write_text("x")
    monkeypatch.setattr(page, "_draw", lambda folder, figures: (folder / "a.svg").write_text("new"))
    with files.locked(in_progress, "figures"):
        page.write_figures(run / "figures", [])
        assert (in_progress / "half.svg").exists()
    assert not of_killed.exists()
    assert not of_this_process.exists()
    assert "half.svg" not in os.listdir(run / "figures")


def test_a_run_that_finished_meanwhile_is_not_resumed(stopped, trained_folders, monkeypatch):
    """The second of two processes that resume at once reads a stopped run, and then finds it finished."""
    original = Folder.locked

    def lock_after_finish(self):
        shutil.rmtree(stopped)
        shutil.copytree(trained_folders / "run", stopped)
        return original(self)

    monkeypatch.setattr(Folder, "locked", lock_after_finish)
    assert_refused("is already finished", durable.resume, stopped)


def test_stores_are_written_in_the_format_that_is_read(run):
    assert zarr.open_group(run / "telemetry.zarr", mode="r").metadata.zarr_format == array_store.FORMAT
