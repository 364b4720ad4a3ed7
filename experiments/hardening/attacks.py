"""Attacks jaxaudit by commands and files, and reports the time, memory and message of each command.

    python experiments/hardening/attacks.py [--only NAME ...] [--source FOLDER]

Every attack starts from a copy of a small run, changes it or its environment, and runs one command in a separate
process. It is held off if the command ends in time with an expected exit code, with one sentence if that is not 0, with
less than 1 GiB more memory than the same command without an attack, and without the intended harm. With `--source`,
the commands are those of another checkout, which is how the column "before" of the table was measured.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import pickle
import re
import resource
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from commands import SPEC, update_digests

SECONDS = 120.0
"""Seconds after which a command counts as hanging and is killed."""

MEMORY = 2**30
"""Additional bytes that an attack may cost."""


class Payload:
    """An object that creates a file when it is unpickled."""

    def __init__(self, path: Path):
        self._path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self._path,)


@dataclass
class Place:
    """The files of one attack.

    Attributes:
      root: the folder of all files.
      run: a copy of a finished run.
      stopped: a copy of a run that was stopped while its forks were trained.
      harm: a file that must not be created, or must not change if it exists.
      spec: the spec of the runs.
    """

    root: Path
    run: Path
    stopped: Path
    harm: Path
    spec: Path


@dataclass
class Attack:
    """A change, the command that encounters it, and the permitted results.

    Attributes:
      make: function that makes the change.
      argv: function that returns the arguments of the command.
      codes: permitted exit codes.
      words: a regular expression that the message must match.
      address_space: the limit of the command's address space in bytes, or None.
      environment: additional environment variables.
      seconds: processor seconds that the command may take, in addition to those of refusing a wrong spec.
    """

    make: Callable[[Place], None]
    argv: Callable[[Place], list[object]]
    codes: tuple[int, ...] = (2,)
    words: str = ""
    address_space: int | None = None
    environment: dict[str, str] = field(default_factory=dict)
    seconds: float = 30.0


ATTACKS: dict[str, Attack] = {}


def attack(name: str, argv: Callable[[Place], list[object]], **settings: Any) -> Callable[[Any], Any]:
    """Returns a decorator that registers the function that makes an attack's change."""

    def register(make: Callable[[Place], None]) -> Callable[[Place], None]:
        ATTACKS[name] = Attack(make, argv, **settings)
        return make

    return register


def report(p: Place) -> list[object]:
    """Reports the finished run."""
    return ["report", p.run]


def replay(p: Place) -> list[object]:
    """Replays the controls of the finished run."""
    return ["replay", p.run, "--condition", "control @8"]


def resume(p: Place) -> list[object]:
    """Resumes the stopped run."""
    return ["resume", p.stopped]


def run(p: Place) -> list[object]:
    """Runs the spec in a new folder."""
    return ["run", p.spec, "-o", p.root / "new"]


def edit(path: Path, change: Callable[[Any], Any]) -> None:
    """Changes the value in a JSON file."""
    value = json.loads(path.read_text())
    path.write_text(json.dumps(change(value) or value))


def change_audit(p: Place, **audit: object) -> None:
    """Changes values of [audit] in the spec."""
    text = p.spec.read_text()
    for key, value in audit.items():
        text = re.sub(rf"^{key} = .*$", f"{key} = {value}", text, flags=re.MULTILINE)
    p.spec.write_text(text)


def chunks(p: Place) -> dict[str, Any]:
    """Reads the metadata of the performance of the finished run."""
    return json.loads((p.run / "telemetry.zarr/performance/zarr.json").read_text())


def zarr_2(p: Place, filters: list[dict[str, str]], content: bytes) -> None:
    """Replaces telemetry by zarr's format 2, with filters of the performance."""
    store = p.run / "telemetry.zarr"
    shutil.rmtree(store)
    for name, dims in {"performance": ["seed", "condition", "step"]}.items():
        (store / name).mkdir(parents=True)
        array = {
            "zarr_format": 2,
            "shape": [1, 1, 1],
            "chunks": [1, 1, 1],
            "dtype": "|O",
            "compressor": None,
            "fill_value": 0,
            "order": "C",
            "filters": filters,
        }
        (store / name / ".zarray").write_text(json.dumps(array))
        (store / name / ".zattrs").write_text(json.dumps({"_ARRAY_DIMENSIONS": dims}))
        (store / name / "0.0.0").write_bytes(content)
    (store / ".zgroup").write_text('{"zarr_format": 2}')


OLD_NUMCODECS = {"NUMCODECS_ALLOW_UNSAFE_PICKLE_DECODE": "1"}


@attack("pickle in zarr", report, environment=OLD_NUMCODECS, words="not a zarr store of format 3")
def _(p: Place) -> None:
    zarr_2(p, [{"id": "vlen-utf8"}, {"id": "pickle"}], pickle.dumps(Payload(p.harm)))


def write_archive(path: Path, arrays: dict[str, np.ndarray]) -> None:
    """Writes arrays by `numpy.savez`."""
    with path.open("wb") as file:
        np.savez(file, **arrays)


def add_monitor(p: Place) -> None:
    """Adds a monitor to the spec."""
    with p.spec.open("a") as file:
        file.write(f'\n[monitor]\nfile = "{p.root / "monitor.npz"}"\n')


@attack("pickle in a monitor", run, words="not a monitor's file|is damaged")
def _(p: Place) -> None:
    add_monitor(p)
    write_archive(p.root / "monitor.npz", {"description": np.array([Payload(p.harm)], object)})


@attack("pickle in telemetry rows", resume, codes=(0, 2), words="unpickled|damaged")
def _(p: Place) -> None:
    for rows in p.stopped.glob("batches/*/*/rows-*.npz"):
        write_archive(rows, {"performance": np.array([Payload(p.harm)], object)})


@attack("link: a figure", report, words="is a link")
def _(p: Place) -> None:
    p.harm.write_text("mine")
    (p.run / "figures/performance.svg").unlink()
    (p.run / "figures/performance.svg").symlink_to(p.harm)


@attack("link: the figures' folder", report, words="is a link")
def _(p: Place) -> None:
    p.harm.write_text("mine")
    shutil.rmtree(p.run / "figures")
    (p.root / "elsewhere").mkdir()
    (p.run / "figures").symlink_to(p.root / "elsewhere")


@attack("link: report.html.part", report, words="is a link")
def _(p: Place) -> None:
    p.harm.write_text("mine")
    (p.run / "report.html.part").symlink_to(p.harm)


@attack("link: .unfinished-environment.json", resume, words="is a link")
def _(p: Place) -> None:
    p.harm.write_text("mine")
    (p.stopped / ".unfinished-environment.json").symlink_to(p.harm)


@attack("link: telemetry.zarr", resume, words="is a link")
def _(p: Place) -> None:
    elsewhere = p.root / "elsewhere"
    (p.stopped / "telemetry.zarr").rename(elsewhere)
    p.harm.write_text("mine")
    p.harm.rename(elsewhere / "mine.partial")
    (p.stopped / "telemetry.zarr").symlink_to(elsewhere)
    p.harm = elsewhere / "mine.partial"


@attack("a pipe in a run's folder", report, words="neither a file nor a folder")
def _(p: Place) -> None:
    (p.run / "metrics.csv").unlink()
    os.mkfifo(p.run / "metrics.csv")


@attack("a plan of a billion lanes", resume, words="plan.json is damaged")
def _(p: Place) -> None:
    edit(p.stopped / "plan.json", lambda plan: [one.update(width=10**9) for one in plan["batches"]] and None)


@attack("a plan of a billion lanes, replayed", replay, words="plan.json is damaged")
def _(p: Place) -> None:
    edit(p.run / "plan.json", lambda plan: [one.update(width=10**9) for one in plan["batches"]] and None)


@attack("a monitor that inflates a thousandfold", run, words="monitor")
def _(p: Place) -> None:
    add_monitor(p)
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": "<f8", "fortran_order": False, "shape": (10**9,)})
    with (
        zipfile.ZipFile(p.root / "monitor.npz", "w", zipfile.ZIP_DEFLATED) as file,
        file.open("clean.npy", "w", force_zip64=True) as member,
    ):
        member.write(header.getvalue())
        for _ in range(8000):
            member.write(bytes(10**6))


@attack("a pipe for a monitor", run, words="is not a file")
def _(p: Place) -> None:
    add_monitor(p)
    os.mkfifo(p.root / "monitor.npz")


@attack("a million seeds", run, seconds=3, words="seeds must be")
def _(p: Place) -> None:
    change_audit(p, seeds=10**6)


@attack("300,000 conditions in one entry", run, seconds=5, words="at most 100000 conditions")
def _(p: Place) -> None:
    with p.spec.open("a") as file:
        magnitudes = ", ".join(str(n / 7) for n in range(1, 300_001))
        file.write(f'\n[[perturbation]]\nkind = "weight_noise"\nonset = 4\nmagnitude = [{magnitudes}]\n')


@attack("300,000 conditions in 300 entries", run, seconds=5, words="conditions")
def _(p: Place) -> None:
    with p.spec.open("a") as file:
        for onset in range(300):
            magnitudes = ", ".join(f"{n}.{onset + 1}" for n in range(1, 1001))
            file.write(f'\n[[perturbation]]\nkind = "weight_noise"\nonset = 4\nmagnitude = [{magnitudes}]\n')


def change_steps(folder: Path) -> None:
    """Changes a stored spec to 200 million steps."""
    text = (folder / "spec.toml").read_text()
    (folder / "spec.toml").write_text(re.sub(r"^steps = .*$", "steps = 200000000", text, flags=re.MULTILINE))


@attack("200 million steps, replayed", replay, words="steps must be|damaged")
def _(p: Place) -> None:
    change_steps(p.run)


@attack("200 million steps, resumed", resume, words="steps must be|damaged")
def _(p: Place) -> None:
    change_steps(p.stopped)


@attack("200 million steps, reported", report, codes=(0, 2), seconds=30)
def _(p: Place) -> None:
    change_steps(p.run)


@attack("a key of 20,000 parts", run, seconds=3, words="dotted parts")
def _(p: Place) -> None:
    p.spec.write_text(p.spec.read_text() + "\n" + ".".join("a" * 20_000) + " = 1\n")


@attack("a stored spec with a key of 20,000 parts", report, words="dotted parts")
def _(p: Place) -> None:
    with (p.run / "spec.toml").open("a") as file:
        file.write("\n" + ".".join("a" * 20_000) + " = 1\n")


@attack("a spec of 200 MB", run, seconds=3, words="larger than")
def _(p: Place) -> None:
    with p.spec.open("a") as file:
        for _ in range(200):
            file.write("#" * 10**6 + "\n")


@attack("a name that is not UTF-8", lambda p: ["run", p.spec, "-o", os.fsencode(p.root) + b"/\xff\xfe"], words="UTF-8")
def _(p: Place) -> None:
    pass


@attack("too little memory to draw", report, codes=(1,), address_space=2 * 2**30, words="draw")
def _(p: Place) -> None:
    pass


@attack("a window of 2^31 - 1", run, words="window")
def _(p: Place) -> None:
    p.spec.write_text(p.spec.read_text().replace("window = 4", "window = 2147483647"))


@attack("a window of ten million", run, codes=(0, 2), seconds=30)
def _(p: Place) -> None:
    p.spec.write_text(p.spec.read_text().replace("window = 4", "window = 10000000"))


DEEP = "[" * 100_000 + "]" * 100_000


def register_damage(
    name: str, file: str, content: bytes, argv: Callable[[Place], list[object]], codes: tuple[int, ...]
) -> None:
    """Registers an attack that replaces a file of both runs."""

    def make(p: Place) -> None:
        for folder in (p.run, p.stopped):
            (folder / file).write_bytes(content)

    ATTACKS[f"{name}: {file}, {argv.__name__}"] = Attack(make, argv, codes)


for _file in ("environment.json", "plan.json", "spec.toml", "metrics.csv", "summary.csv"):
    for _argv in (report, replay, resume):
        _codes = (0, 2)
        register_damage("deep", _file, DEEP.encode(), _argv, _codes)
        register_damage("not UTF-8", _file, b'{"a": "\xff\xfe"}\n', _argv, _codes)
        register_damage("empty", _file, b"", _argv, _codes)
for _name in ("zarr.json", "performance/zarr.json"):
    for _argv in (report, replay, resume):
        register_damage("deep", f"telemetry.zarr/{_name}", DEEP.encode(), _argv, (2,))
        register_damage("not UTF-8", f"telemetry.zarr/{_name}", b'{"a": "\xff"}', _argv, (2,))
for _text in ('{"devices": "many"}', '{"gathered": "all"}', '{"packages": 5}', '{"remarks": 7}'):
    for _argv in (report, replay, resume):
        register_damage(f"contradictory {_text}", "environment.json", _text.encode(), _argv, (0, 2))


@attack("figures of earlier conditions", report, codes=(0,))
def _(p: Place) -> None:
    for kind in ("svg", "png"):
        shutil.copy(p.run / f"figures/performance.{kind}", p.run / f"figures/earlier.{kind}")
    (p.run / "figures/mine.png").write_bytes(b"mine")


def change_shape(p: Place, shape: list[int]) -> None:
    """Changes all metadata of the telemetry consistently to a larger shape."""
    store = p.run / "telemetry.zarr"
    names = ["seed", "condition", "step"]
    for path in [store / "zarr.json", *store.glob("*/zarr.json")]:

        def change(value: dict[str, Any]) -> None:
            arrays = value.get("consolidated_metadata", {}).get("metadata", {"": value}).values()
            for array in arrays:
                if array.get("node_type") == "array":
                    for n, dim in enumerate(array["dimension_names"]):
                        if dim in names:
                            array["shape"][n] = shape[names.index(dim)]

        edit(path, change)


@attack("telemetry of 10^15 values", report, words="in memory")
def _(p: Place) -> None:
    change_shape(p, [10**5, 10**5, 10**5])


@attack("telemetry of 10^15 values, replayed", replay, words="in memory")
def _(p: Place) -> None:
    change_shape(p, [10**5, 10**5, 10**5])


def bomb(size: int) -> bytes:
    """Returns a Zstandard frame that inflates to `size` zeros, by blocks that repeat one byte (RFC 8878)."""
    block = 128 * 1024
    count = size // block
    header = b"\x28\xb5\x2f\xfd" + bytes([0b11100000]) + struct.pack("<Q", count * block)
    blocks = [((n == count - 1) | 1 << 1 | block << 3).to_bytes(3, "little") + b"\0" for n in range(count)]
    return header + b"".join(blocks)


@attack("a chunk that inflates to 8 GiB", report, words="inflates")
def _(p: Place) -> None:
    for path in (p.run / "telemetry.zarr/performance/c").rglob("*"):
        if path.is_file():
            path.write_bytes(bomb(2**33))


@attack("labels that inflate to 8 GiB", report, words="inflates")
def _(p: Place) -> None:
    (p.run / "telemetry.zarr/condition/c/0").write_bytes(bomb(2**33))


def change_pieces(folder: Path, new_pieces: list[list[int]]) -> None:
    """Changes the lanes of checkpoints, with matching digests."""
    import hashlib

    for path in folder.rglob("digest.json"):
        content = json.loads(path.read_text())
        content.pop("digest")
        content["pieces"] = new_pieces
        digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
        path.write_text(json.dumps(content | {"digest": digest}))


@attack("a checkpoint of a billion lanes", replay, words="damaged")
def _(p: Place) -> None:
    change_pieces(p.run, [[0, 10**9]])


@attack("a checkpoint of a billion lanes, resumed", resume, codes=(0, 2))
def _(p: Place) -> None:
    change_pieces(p.stopped, [[0, 10**9]])


@attack("a checkpoint of no lanes", replay, words="damaged")
def _(p: Place) -> None:
    change_pieces(p.run, [])


@attack("a checkpoint whose arrays are others'", replay, words="damaged")
def _(p: Place) -> None:
    for file in p.run.rglob("manifest.ocdbt"):
        file.write_bytes(os.urandom(200))
    update_digests(p.run)


@attack("/tmp cannot be written to", report, codes=(0,), environment={"TMPDIR": "/nonexistent"}, seconds=60)
def _(p: Place) -> None:
    pass


def run_command(argv: list[object], attack_: Attack, source: Path | None, place: Place) -> dict[str, Any]:
    """Runs a command; returns its exit code, output, processor seconds and peak memory."""
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONSAFEPATH": "1"} | attack_.environment
    if source is not None:
        environment["PYTHONPATH"] = str(source)

    def limit() -> None:
        if attack_.address_space:
            resource.setrlimit(resource.RLIMIT_AS, (attack_.address_space, attack_.address_space))

    output = place.root / "words.txt"
    with output.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "jaxaudit", *[a if isinstance(a, bytes) else str(a) for a in argv]],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            env=environment,
            cwd=place.root,
            preexec_fn=limit,
        )
        signal.signal(signal.SIGALRM, lambda *_: process.kill())
        signal.alarm(int(SECONDS))
        _, status, usage = os.wait4(process.pid, 0)
        signal.alarm(0)
        process.returncode = os.waitstatus_to_exitcode(status)
    return {
        "code": process.returncode,
        "seconds": round(usage.ru_utime + usage.ru_stime, 1),
        "memory": usage.ru_maxrss * 1024,
        "said": output.read_text(errors="replace"),
    }


def run_attack(
    name: str, attack_: Attack, prepared: Path, source: Path | None, usual_costs: dict[str, float]
) -> dict[str, Any]:
    """Runs one attack, and returns the result and whether it was held off."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        place = Place(root, root / "run", root / "stopped", root / "harm", root / "spec.toml")
        place.spec.write_text(SPEC)
        for kind in ("run", "stopped"):
            shutil.copytree(prepared / kind, root / kind)
        attack_.make(place)
        before = place.harm.read_bytes() if place.harm.exists() else None
        result = run_command(attack_.argv(place), attack_, source, place)
        after = place.harm.read_bytes() if place.harm.exists() else None
        lines = [line for line in result["said"].splitlines() if line.strip()]
        failures = []
        if result["code"] not in attack_.codes:
            failures.append(f"exit code {result['code']}")
        if before != after:
            failures.append("harm done")
        if result["code"] == 2 and not re.search(attack_.words, result["said"]):
            failures.append("another sentence")
        if "Traceback" in result["said"] or "unexpected" in result["said"]:
            failures.append("no sentence")
        kind = str(attack_.argv(place)[0])
        if result["memory"] > usual_costs.get(kind, 0) + MEMORY:
            failures.append(f"{result['memory'] >> 20} MiB")
        if result["code"] == -signal.SIGKILL or result["seconds"] > attack_.seconds + usual_costs.get("seconds", 0):
            failures.append(f"{result['seconds']} s")
        if name.startswith("figures of earlier"):
            figures = {path.name for path in (place.run / "figures").iterdir()}
            if "earlier.svg" in figures or "mine.png" not in figures:
                failures.append("figures are left or lost")
        return {"attack": name, "held": not failures, "bad": failures, **result, "said": lines[-1] if lines else ""}


def main() -> int:
    """Prints a line of JSON for every attack; returns 1 if one was not held off, else 0."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", metavar="NAME", help="attacks whose names have these prefixes")
    parser.add_argument("--source", type=Path, help="a checkout whose commands are attacked (the one installed)")
    arguments = parser.parse_args()
    all_held = True
    with tempfile.TemporaryDirectory() as folder:
        prepared = Path(folder)
        (prepared / "spec.toml").write_text(SPEC)
        no_attack = Attack(lambda p: None, lambda p: [], (0,), seconds=300)
        place = Place(prepared, prepared / "run", prepared / "stopped", prepared / "harm", prepared / "spec.toml")
        usual_costs = {}
        for argv in (["run", place.spec, "-o", place.run], ["report", place.run], replay(place)):
            result = run_command(argv, no_attack, arguments.source, place)
            if result["code"]:
                raise RuntimeError(result["said"])
            usual_costs[argv[0]] = result["memory"]
        (prepared / "wrong.toml").write_text(SPEC.replace("seeds = 3", "seeds = 0"))
        usual_costs["seconds"] = run_command(
            ["run", prepared / "wrong.toml", "-o", prepared / "none"], no_attack, arguments.source, place
        )["seconds"]
        _stop(place, arguments.source)
        usual_costs["resume"] = usual_costs["run"]
        for name, attack_ in ATTACKS.items():
            if not arguments.only or name.startswith(tuple(arguments.only)):
                result = run_attack(name, attack_, prepared, arguments.source, usual_costs)
                print(json.dumps(result, ensure_ascii=False), flush=True)
                all_held = all_held and result["held"]
    return 0 if all_held else 1


def _stop(place: Place, source: Path | None) -> None:
    """Creates a run that is killed while its forks are trained."""
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONSAFEPATH": "1"}
    environment |= {} if source is None else {"PYTHONPATH": str(source)}
    process = subprocess.Popen(
        [sys.executable, "-m", "jaxaudit", "run", place.spec, "-o", place.stopped],
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    while not list(place.stopped.glob("batches/0001/*/rows-*")) and process.poll() is None:
        time.sleep(0.002)
    process.kill()
    process.wait()


if __name__ == "__main__":
    sys.exit(main())
