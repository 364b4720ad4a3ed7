"""Parts of the measurement: two audits by the command line, whose runs are archived."""

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
"""The changes of the specs for a rehearsal."""

LARGEST = 15 * 2**20
"""The maximal size in bytes of a run that is archived with its checkpoints."""


def audit(part: Part, name: str) -> None:
    """Runs a spec, interrupts it shortly before its turn ends, and archives the run's folder.

    The environment variables MEASUREMENT and AUDITS are the folders of archives and of runs.
    """
    spec, out = HERE / f"{name}.toml", Path(os.environ["AUDITS"]).resolve() / name
    out.parent.mkdir(parents=True, exist_ok=True)
    if part.tiny:
        text = spec.read_text()
        for before, after in TINY[name]:
            if before not in text:
                raise ValueError(f"{spec.name} does not contain {before!r}")
            text = text.replace(before, after)
        spec = out.parent / spec.name
        spec.write_text(text)
    part.wait_for_turn()
    start = time.monotonic()
    command = [sys.executable, "-m", "jaxaudit", "run", str(spec), "-o", str(out)]
    # In the repository's root, the folder `jaxaudit` would shadow the installed package.
    process = subprocess.Popen(command, stdout=sys.stderr, stderr=sys.stderr, cwd=out.parent)
    try:
        code = process.wait(timeout=max(1.0, min(part.seconds_left - 60, 1e6)))
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)  # it finishes its chunk and stores its results
        code = process.wait(timeout=50)
    seconds = time.monotonic() - start
    archive = Path(os.environ["MEASUREMENT"]) / f"audit-{name}.tar.gz"
    with_checkpoints = pack(out, archive)
    part.record(
        f"audit, {name}", exit_code=code, seconds=[seconds], whole_folder=with_checkpoints, bytes=archive.stat().st_size
    )


def pack(out: Path, archive: Path) -> bool:
    """Archives a run's folder; returns whether the archive has its checkpoints, which resuming needs."""
    size = sum(path.stat().st_size for path in out.rglob("*") if path.is_file())
    with_checkpoints = size < LARGEST

    def selected(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
        return member if with_checkpoints or not {"checkpoints", "batches"} & set(Path(member.name).parts) else None

    with tarfile.open(archive, "w:gz") as tar:
        tar.add(out, out.name, filter=selected)
    return with_checkpoints
