"""Attacks jaxaudit by commands and files, and says what each command did: how long, how much memory, which sentence.

    python experiments/hardening/attacks.py [--only NAME ...] [--source FOLDER]

Every attack begins from a copy of a small run, changes it or its surroundings, and starts one command as a process of
its own. It is held if the command ends in time with an expected exit code, in one sentence where that is not 0,
with less than 1 GiB more memory than the same kind of command takes untouched, and without the harm that was planted.
`--source` has the commands run from another checkout, which is how the column "before" of the table was made.
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
from commands import SPEC, sealed

SECONDS = 120.0
"""After which a command is ended: it has hung."""

MEMORY = 2**30
"""Bytes that an attack may cost beside what the command takes anyway."""


class Payload:
    """Unpickled, it makes a file."""

    def __init__(self, path: Path):
        self._path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self._path,)


@dataclass
class Place:
    """Where one attack happens.

    Attributes:
      run: a copy of a finished run.
      stopped: a copy of one that was stopped while its forks were trained.
      harm: a file that must not appear, or, where it is there, must not change.
      spec: of the runs.
    """

    root: Path
    run: Path
    stopped: Path
    harm: Path
    spec: Path


@dataclass
class Attack:
    """A change, the command that meets it, and how that may end.

    Attributes:
      make: makes the change.
      argv: of the command.
      codes: exit codes that are right.
      words: a regular expression that what it says must have in it.
      address_space: bytes that the command may have; None: all.
      environment: variables.
      seconds: of the processor that the command may take, beside those of a spec that is refused at once.
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
    """Registers the function that makes an attack's change."""

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
    """Goes on with the stopped run."""
    return ["resume", p.stopped]


def run(p: Place) -> list[object]:
    """Runs the spec in a new folder."""
    return ["run", p.spec, "-o", p.root / "new"]


def edit(path: Path, change: Callable[[Any], Any]) -> None:
    """Changes the value in a JSON file."""
    value = json.loads(path.read_text())
    path.write_text(json.dumps(change(value) or value))


def perturbed(p: Place, **audit: object) -> None:
    """The spec with other values in [audit]."""
    text = p.spec.read_text()
    for key, value in audit.items():
        text = re.sub(rf"^{key} = .*$", f"{key} = {value}", text, flags=re.MULTILINE)
    p.spec.write_text(text)


def chunks(p: Place) -> dict[str, Any]:
    """The metadata of the performance of the finished run."""
    return json.loads((p.run / "telemetry.zarr/performance/zarr.json").read_text())


def zarr_2(p: Place, filters: list[dict[str, str]], content: bytes) -> None:
    """Telemetry in zarr's format 2, whose performance is filtered so."""
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


def archive(path: Path, arrays: dict[str, np.ndarray]) -> None:
    """Writes arrays as `numpy.savez` does."""
    with path.open("wb") as file:
        np.savez(file, **arrays)


def monitored(p: Place) -> None:
    """The spec with a monitor."""
    with p.spec.open("a") as file:
        file.write(f'\n[monitor]\nfile = "{p.root / "monitor.npz"}"\n')


@attack("pickle in a monitor", run, words="not a monitor's file|is damaged")
def _(p: Place) -> None:
    monitored(p)
    archive(p.root / "monitor.npz", {"description": np.array([Payload(p.harm)], object)})


@attack("pickle in telemetry rows", resume, codes=(0, 2), words="unpickled|damaged")
def _(p: Place) -> None:
    for rows in p.stopped.glob("batches/*/*/rows-*.npz"):
        archive(rows, {"performance": np.array([Payload(p.harm)], object)})


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
    monitored(p)
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
    monitored(p)
    os.mkfifo(p.root / "monitor.npz")


@attack("a million seeds", run, seconds=3, words="seeds must be")
def _(p: Place) -> None:
    perturbed(p, seeds=10**6)


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


def stored_steps(folder: Path) -> None:
    """A stored spec of 200 million steps."""
    text = (folder / "spec.toml").read_text()
    (folder / "spec.toml").write_text(re.sub(r"^steps = .*$", "steps = 200000000", text, flags=re.MULTILINE))


@attack("200 million steps, replayed", replay, words="steps must be|damaged")
def _(p: Place) -> None:
    stored_steps(p.run)


@attack("200 million steps, resumed", resume, words="steps must be|damaged")
def _(p: Place) -> None:
    stored_steps(p.stopped)


@attack("200 million steps, reported", report, codes=(0, 2), seconds=30)
def _(p: Place) -> None:
    stored_steps(p.run)


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


def damaged(
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
        damaged("deep", _file, DEEP.encode(), _argv, _codes)
        damaged("not UTF-8", _file, b'{"a": "\xff\xfe"}\n', _argv, _codes)
        damaged("empty", _file, b"", _argv, _codes)
for _name in ("zarr.json", "performance/zarr.json"):
    for _argv in (report, replay, resume):
        damaged("deep", f"telemetry.zarr/{_name}", DEEP.encode(), _argv, (2,))
        damaged("not UTF-8", f"telemetry.zarr/{_name}", b'{"a": "\xff"}', _argv, (2,))
for _text in ('{"devices": "many"}', '{"gathered": "all"}', '{"packages": 5}', '{"remarks": 7}'):
    for _argv in (report, replay, resume):
        damaged(f"contradictory {_text}", "environment.json", _text.encode(), _argv, (0, 2))


@attack("figures of earlier conditions", report, codes=(0,))
def _(p: Place) -> None:
    for kind in ("svg", "png"):
        shutil.copy(p.run / f"figures/performance.{kind}", p.run / f"figures/earlier.{kind}")
    (p.run / "figures/mine.png").write_bytes(b"mine")


def shaped(p: Place, shape: list[int]) -> None:
    """Telemetry whose metadata say that it is larger, all of them alike."""
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
    shaped(p, [10**5, 10**5, 10**5])


@attack("telemetry of 10^15 values, replayed", replay, words="in memory")
def _(p: Place) -> None:
    shaped(p, [10**5, 10**5, 10**5])


def bomb(size: int) -> bytes:
    """A frame of Zstandard that inflates to so many zeros, by blocks that repeat one byte (RFC 8878)."""
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


def pieces(folder: Path, found: list[list[int]]) -> None:
    """A checkpoint that says it has other lanes, with the digest that fits."""
    import hashlib

    for path in folder.rglob("digest.json"):
        content = json.loads(path.read_text())
        content.pop("digest")
        content["pieces"] = found
        digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
        path.write_text(json.dumps(content | {"digest": digest}))


@attack("a checkpoint of a billion lanes", replay, words="damaged")
def _(p: Place) -> None:
    pieces(p.run, [[0, 10**9]])


@attack("a checkpoint of a billion lanes, resumed", resume, codes=(0, 2))
def _(p: Place) -> None:
    pieces(p.stopped, [[0, 10**9]])


@attack("a checkpoint of no lanes", replay, words="damaged")
def _(p: Place) -> None:
    pieces(p.run, [])


@attack("a checkpoint whose arrays are others'", replay, words="damaged")
def _(p: Place) -> None:
    for file in p.run.rglob("manifest.ocdbt"):
        file.write_bytes(os.urandom(200))
    sealed(p.run)


@attack("/tmp cannot be written to", report, codes=(0,), environment={"TMPDIR": "/nonexistent"}, seconds=60)
def _(p: Place) -> None:
    pass


def measured(argv: list[object], one: Attack, source: Path | None, place: Place) -> dict[str, Any]:
    """Starts a command; its exit code, what it said, its processor's seconds and the most memory it had."""
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONSAFEPATH": "1"} | one.environment
    if source is not None:
        environment["PYTHONPATH"] = str(source)

    def limit() -> None:
        if one.address_space:
            resource.setrlimit(resource.RLIMIT_AS, (one.address_space, one.address_space))

    words = place.root / "words.txt"
    with words.open("wb") as said:
        process = subprocess.Popen(
            [sys.executable, "-m", "jaxaudit", *[a if isinstance(a, bytes) else str(a) for a in argv]],
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=said,
            env=environment,
            cwd=place.root,
            preexec_fn=limit,
        )
        signal.signal(signal.SIGALRM, lambda *_: process.kill())
        signal.alarm(int(SECONDS))
        _, status, used = os.wait4(process.pid, 0)
        signal.alarm(0)
        process.returncode = os.waitstatus_to_exitcode(status)
    return {
        "code": process.returncode,
        "seconds": round(used.ru_utime + used.ru_stime, 1),
        "memory": used.ru_maxrss * 1024,
        "said": words.read_text(errors="replace"),
    }


def tried(name: str, one: Attack, made: Path, source: Path | None, usual: dict[str, float]) -> dict[str, Any]:
    """One attack, and whether it is held."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        place = Place(root, root / "run", root / "stopped", root / "harm", root / "spec.toml")
        place.spec.write_text(SPEC)
        for kind in ("run", "stopped"):
            shutil.copytree(made / kind, root / kind)
        one.make(place)
        before = place.harm.read_bytes() if place.harm.exists() else None
        found = measured(one.argv(place), one, source, place)
        after = place.harm.read_bytes() if place.harm.exists() else None
        said = [line for line in found["said"].splitlines() if line.strip()]
        bad = []
        if found["code"] not in one.codes:
            bad.append(f"exit code {found['code']}")
        if before != after:
            bad.append("harm done")
        if found["code"] == 2 and not re.search(one.words, found["said"]):
            bad.append("another sentence")
        if "Traceback" in found["said"] or "unexpected" in found["said"]:
            bad.append("no sentence")
        kind = str(one.argv(place)[0])
        if found["memory"] > usual.get(kind, 0) + MEMORY:
            bad.append(f"{found['memory'] >> 20} MiB")
        if found["code"] == -signal.SIGKILL or found["seconds"] > one.seconds + usual.get("seconds", 0):
            bad.append(f"{found['seconds']} s")
        if name.startswith("figures of earlier"):
            figures = {path.name for path in (place.run / "figures").iterdir()}
            if "earlier.svg" in figures or "mine.png" not in figures:
                bad.append("figures are left or lost")
        return {"attack": name, "held": not bad, "bad": bad, **found, "said": said[-1] if said else ""}


def main() -> int:
    """Prints a line of JSON for every attack; the exit code is 1 if one was not held."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", metavar="NAME", help="attacks whose names begin so")
    parser.add_argument("--source", type=Path, help="a checkout whose commands are attacked (the one installed)")
    chosen = parser.parse_args()
    held = True
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder)
        (made / "spec.toml").write_text(SPEC)
        plain = Attack(lambda p: None, lambda p: [], (0,), seconds=300)
        place = Place(made, made / "run", made / "stopped", made / "harm", made / "spec.toml")
        usual = {}
        for argv in (["run", place.spec, "-o", place.run], ["report", place.run], replay(place)):
            found = measured(argv, plain, chosen.source, place)
            if found["code"]:
                raise RuntimeError(found["said"])
            usual[argv[0]] = found["memory"]
        (made / "wrong.toml").write_text(SPEC.replace("seeds = 3", "seeds = 0"))
        usual["seconds"] = measured(["run", made / "wrong.toml", "-o", made / "none"], plain, chosen.source, place)[
            "seconds"
        ]
        _stop(place, chosen.source)
        usual["resume"] = usual["run"]
        for name, one in ATTACKS.items():
            if not chosen.only or name.startswith(tuple(chosen.only)):
                result = tried(name, one, made, chosen.source, usual)
                print(json.dumps(result, ensure_ascii=False), flush=True)
                held = held and result["held"]
    return 0 if held else 1


def _stop(place: Place, source: Path | None) -> None:
    """Makes a run that was killed while its forks were trained."""
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
