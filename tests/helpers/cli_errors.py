"""Commands that fail because of a user's error: they print one sentence, and change no file."""

import hashlib
from pathlib import Path

from jaxaudit.cli import main as cli


def folder_digests(folder: Path) -> dict[str, str]:
    """Returns every path below a folder, with a digest of its content."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""
        for path in sorted(folder.rglob("*"))
    }


def cli_error(capsys, *argv: str) -> str:
    """Asserts that a command fails with one sentence and changes no file, and returns the sentence."""
    before = folder_digests(Path.cwd())
    code = cli.main(argv)
    out, err = capsys.readouterr()
    assert code == 2, err
    assert out == ""
    assert err.startswith("jaxaudit: ")
    assert err.endswith("\n")
    assert len(err.splitlines()) == 1
    assert "Traceback" not in err
    assert folder_digests(Path.cwd()) == before
    return err
