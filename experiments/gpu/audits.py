"""Two real audits by the command line, whose runs come back as archives: parts of the measurement."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path

from part import Part

HERE = Path(__file__).resolve().parent / "audits"

TINY = {
    "halfcheetah": (
        ('name = "HalfCheetah-v5"', 'name = "InvertedPendulum-v5"'),
        ('physics = "mjx"', 'physics = "c"'),
        ("seeds = 64", "seeds = 2"),
        ("steps = 50", "steps = 12"),
        ("num_envs = 64", "num_envs = 2"),
        ("minibatch_size = 256", "minibatch_size = 32"),
        ("window = 10\nhold = 10\nhorizon = 30", "window = 3\nhold = 3\nhorizon = 3"),
        ("[3, 10, 30, 100, 300, 1000, 3000, 10000]", "[3, 300]"),
        ("duration = 5", "duration = 2"),
    ),
    "gpt2": (
        ('size = "124m"', 'size = "micro"'),
        ("context = 512", "context = 16"),
        ("seeds = 4", "seeds = 2"),
        ("steps = 200", "steps = 20"),
        ("window = 20\nhold = 30\nhorizon = 100", "window = 4\nhold = 4\nhorizon = 8"),
        ("[10, 30, 100]", "[10, 100]"),
        ("duration = 10", "duration = 2"),
    ),
}
"""What a rehearsal changes in the specs."""

LARGEST = 15 * 2**20
"""Bytes that the archive of a run may have; checkpoints are left out where it would have more."""


def audit(part: Part, name: str) -> None:
    """Runs a spec, stopped as by Ctrl-C shortly before its turn ends, and packs the run's folder.

    Environment variables: MEASUREMENT, the folder for archives; AUDITS, the folder for runs.
    """
    spec, out = HERE / f"{name}.toml", Path(os.environ["AUDITS"]).resolve() / name
    out.parent.mkdir(parents=True, exist_ok=True)
    if part.tiny:
        text = spec.read_text()
        for before, after in TINY[name]:
            if before not in text:
                raise ValueError(f"{spec.name} has no {before!r} any more")
            text = text.replace(before, after)
        spec = out.parent / spec.name
        spec.write_text(text)
    part.wait_for_turn()
    begun = time.monotonic()
    command = [sys.executable, "-m", "jaxaudit", "run", str(spec), "-o", str(out)]
    # Elsewhere than in the repository's root, whose folder `jaxaudit` would come before the installed package.
    process = subprocess.Popen(command, stdout=sys.stderr, stderr=sys.stderr, cwd=out.parent)
    try:
        code = process.wait(timeout=max(1.0, min(part.seconds_left - 60, 1e6)))
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)  # it ends its chunk, and keeps what it has
        code = process.wait(timeout=50)
    seconds = time.monotonic() - begun
    archive = Path(os.environ["MEASUREMENT"]) / f"audit-{name}.tar.gz"
    whole = pack(out, archive)
    part.record(f"audit, {name}", exit_code=code, seconds=[seconds], whole_folder=whole, bytes=archive.stat().st_size)


def pack(out: Path, archive: Path) -> bool:
    """Archives a run's folder; whether its checkpoints are in it, without which it is reported but not resumed."""
    size = sum(path.stat().st_size for path in out.rglob("*") if path.is_file())
    whole = size < LARGEST

    def chosen(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
        return member if whole or not {"checkpoints", "batches"} & set(Path(member.name).parts) else None

    with tarfile.open(archive, "w:gz") as tar:
        tar.add(out, out.name, filter=chosen)
    return whole
