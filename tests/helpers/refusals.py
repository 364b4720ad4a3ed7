"""Commands that fail by the user's fault: one sentence, and all is left as it was."""

import hashlib
from pathlib import Path

from jaxaudit.cli import main as cli


def contents(folder: Path) -> dict[str, str]:
    """Every path below a folder, with what it holds."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""
        for path in sorted(folder.rglob("*"))
    }


def refusal(capsys, *argv: str) -> str:
    """The sentence of a command that fails by the user's fault and leaves everything as it was."""
    before = contents(Path.cwd())
    code = cli.main(argv)
    out, err = capsys.readouterr()
    assert code == 2, err
    assert out == ""
    assert err.startswith("jaxaudit: ")
    assert err.endswith("\n")
    assert len(err.splitlines()) == 1
    assert "Traceback" not in err
    assert contents(Path.cwd()) == before
    return err
