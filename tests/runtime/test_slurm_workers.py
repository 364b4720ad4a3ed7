"""Runs of Slurm jobs, where scripts on this machine replace Slurm's commands."""

import os
import sys
from pathlib import Path

import pytest
from small_runs import assert_runs_equal
from worker_runs import PAUSED_SPEC, install_plugin, run_in_one_process, run_through_failures, wait_for

from jaxaudit.runs import lifecycle as durable
from jaxaudit.runtime import backends
from jaxaudit.runtime.backends import Workers
from jaxaudit.runtime.errors import Failed
from jaxaudit.spec.document import parse

pytestmark = pytest.mark.slow

SPEC = PAUSED_SPEC.format(pause=0.1).replace("[1.0, 0.1]", "1.0").replace("[6, 12]", "6")
TWO_WORKERS = Workers("slurm", count=2)

SCRIPTS = {
    "sbatch": """
job = len(list(root.glob("*.sh")))
script = root / f"{job}.sh"
again, code = root / f"{job}.requeue", root / f"{job}.code"
script.write_text(
    f"while true; do bash {sys.argv[1]}; code=$?; [ -e {again} ] || break; rm {again}; done; echo $code > {code}"
)
place = {"JOB_ID": job, "NTASKS": 1, "JOB_NUM_NODES": 1, "NODEID": 0, "JOB_NODELIST": "here", "PROCID": 0, "LOCALID": 0}
environment = os.environ | {f"SLURM_{name}": str(value) for name, value in place.items()}
quiet = subprocess.DEVNULL
started = subprocess.Popen(["bash", script], env=environment, stdout=quiet, stderr=quiet, start_new_session=True)
(root / f"{job}.pid").write_text(str(started.pid))
print(f"Submitted batch job {job}")
""",
    "srun": """
_, _, _, out, _, error, *command = sys.argv
os.dup2(os.open(out.replace("%j", os.environ["SLURM_JOB_ID"]).replace("%t", "0"), os.O_CREAT | os.O_WRONLY), 1)
os.dup2(os.open(error.replace("%j", os.environ["SLURM_JOB_ID"]).replace("%t", "0"), os.O_CREAT | os.O_WRONLY), 2)
os.execvp(command[0], command)
""",
    "sacct": """
print("JobID|State|NodeList")
for script in root.glob("*.sh"):
    code = script.with_suffix(".code")
    state = "RUNNING" if not code.exists() else "COMPLETED" if code.read_text() == "0\\n" else "NODE_FAIL"
    print(f"{script.stem}|{state}|here")
""",
    "scontrol": """
(root / f"{sys.argv[2]}.requeue").touch()
""",
    "scancel": """
os.killpg(int((root / f"{sys.argv[1]}.pid").read_text()), 9)
""",
}


@pytest.fixture(autouse=True)
def slurm(tmp_path, monkeypatch):
    """Puts the scripts on the path, and polls jobs every second."""
    folder = tmp_path / "slurm"
    folder.mkdir()
    for name, text in SCRIPTS.items():
        script = folder / name
        begin = f"#!{sys.executable}\nimport os, pathlib, subprocess, sys\nroot = pathlib.Path({str(folder)!r})"
        script.write_text(begin + text)
        script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(backends, "SLURM_POLL_SECONDS", 1.0)
    for name, value in install_plugin(tmp_path / "plugin").items():
        monkeypatch.setenv(name, value)
    return folder


def test_a_lost_and_a_requeued_job_finish_the_run(slurm, tmp_path, capsys):
    folder = tmp_path / "run"
    run_through_failures(SPEC, folder, TWO_WORKERS)
    assert_runs_equal(folder, run_in_one_process(SPEC, folder, tmp_path))
    assert capsys.readouterr().err.count("lost its worker") == 1, "a job that Slurm requeues was counted as lost"
    assert len(list(slurm.glob("*.pid"))) == 6, "expected the plan, four batches, and a second job of one batch"


def test_an_error_of_the_program_cancels_the_other_jobs(slurm, tmp_path):
    with pytest.raises(Failed, match="a failure on purpose"):
        durable.run(parse(SPEC.replace("pause = 0.1", "fails_at = 4")), tmp_path / "run", TWO_WORKERS)
    running = [path for path in slurm.glob("*.pid") if not path.with_suffix(".code").exists()]
    wait_for(lambda: not [path for path in running if is_alive(int(path.read_text()))], 10)


def is_alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
