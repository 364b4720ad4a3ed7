"""Safe access to files and folders that other processes and other people may write to.

One process at a time fills a folder, every file appears complete or not at all, no symbolic link inside a folder is
followed, and no more of a file is read than `MAX_FILE_BYTES`.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import socket
import stat
import sys
import tomllib
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxaudit.runtime.errors import UserError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

UNFINISHED = ".unfinished-"
"""The prefix of the name of a file or folder while it is written; a killed process leaves such names behind."""

LOCK = ".lock"
"""The name of the file that a process locks while it works in a folder, and removes afterwards."""

MAX_FILE_BYTES = 2**25
"""The size of the largest text or JSON file that is read; the plan of a million lanes is a third as large."""

MAX_KEY_PARTS = 64
"""The most parts of a dotted key in TOML; a spec's keys have one."""

_KEY_AND_DOT = r"""(?:[\w-]++|"[^"\n]*+"|'[^'\n]*+')[ \t]*+\.[ \t]*+"""
_DEEP_KEY = re.compile(rf"""(?<![\w"'-])(?:{_KEY_AND_DOT}){{{MAX_KEY_PARTS}}}""", re.ASCII)

MAX_TRIES = 10
"""How often a folder is created and locked anew if other processes remove it in between."""

LOCKS_UNSUPPORTED = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EBADF, errno.EINVAL}
"""Error codes with which file systems without locks refuse to lock a file."""


@dataclass
class Claim:
    """A folder that this process has claimed.

    Attributes:
      kept: whether the folder's contents stay if an exception follows.
    """

    kept: bool = False

    def keep(self) -> None:
        """Makes the folder's contents stay even if an exception follows."""
        self.kept = True


@contextmanager
def claimed(path: Path, *, is_leftover: Callable[[Path], bool] | None = None, hint: str = "") -> Iterator[Claim]:
    """Claims a new or empty folder for this process and locks it until the block ends.

    If the block ends before it has called the claim's `keep`, everything in the folder is removed, and so are the
    parent folders that were created for it. Nothing that another process created is ever removed.

    Args:
      path: the folder.
      is_leftover: returns whether the contents of a folder that no process has locked were left by a killed process
        and can be removed. The default checks that all names start with `UNFINISHED`.
      hint: the end of the error message for a folder that is not empty.

    Raises:
      UserError: the folder cannot be created, is not empty, its name is not UTF-8, or another process works in it.
    """
    check_path_encoding(path)
    if os.path.exists(path) and not path.is_dir():
        raise UserError(f"{path} exists and is not a folder")
    missing = [p for p in (path.absolute(), *path.absolute().parents) if not os.path.exists(p)]
    try:
        lock = locked(path, f"the folder {path}", create=True)
    except OSError as error:
        _remove_empty(missing)
        raise UserError(f"cannot make the folder {path}: {error.strerror or error}") from None
    claim = Claim()
    try:
        _remove_leftovers(path, is_leftover or _only_unfinished, hint)
        try:
            yield claim
        finally:
            if not claim.kept:
                _remove_contents(path)
    finally:
        lock.close()
        if not claim.kept:
            _remove_empty(missing)


def _remove_empty(folders: Iterable[Path]) -> None:
    for folder in folders:
        with suppress(OSError):  # it was not created, or another process uses it by now
            folder.rmdir()


def _remove_leftovers(path: Path, is_leftover: Callable[[Path], bool], hint: str) -> None:
    """Removes the files that a killed process left in a locked folder; raises UserError if there are any others."""
    if entry_names(path):
        if not is_leftover(path):
            raise UserError(f"the folder {path} exists and is not empty{hint}")
        _remove_contents(path)


def _only_unfinished(path: Path) -> bool:
    return all(name.startswith(UNFINISHED) for name in entry_names(path))


def entry_names(path: Path) -> list[str]:
    """Returns the names in a folder except that of its lock file."""
    return [name for name in os.listdir(path) if name != LOCK]


def _remove_contents(path: Path) -> None:
    for name in entry_names(path):
        remove(path / name)


def remove(path: Path) -> None:
    """Removes a file, a link or a folder with its contents; the target of a link is not touched."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def locked(path: Path, description: str, create: bool = False) -> ExitStack:
    """Locks a folder until the returned context ends; the system releases the lock if the process is killed.

    Args:
      path: the folder.
      description: what the folder is, for the error message.
      create: whether to create the folder if it does not exist.

    Raises:
      UserError: another process has locked it.
      OSError: the folder does not exist or is not writable.
    """
    lock_path = path / LOCK
    for attempt in range(MAX_TRIES):
        try:
            if create:
                path.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(lock_path, os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o666)
        except FileNotFoundError:
            if create and attempt < MAX_TRIES - 1:  # another process has just removed the folder
                continue
            raise
        except OSError as error:
            if error.errno == errno.ELOOP:
                raise UserError(f"{lock_path} is a link, which jaxaudit does not follow") from None
            raise
        with ExitStack() as stack:
            stack.callback(os.close, descriptor)
            _lock_file(lock_path, descriptor, description, stack)
            with suppress(FileNotFoundError):
                # Another process may have removed the file in between, and a third one may have locked a new file.
                if os.path.samestat(os.fstat(descriptor), os.stat(lock_path, follow_symlinks=False)):
                    stack.callback(_unlink, lock_path)
                    return stack.pop_all()
    raise UserError(f"another process is at work on {description}")


def _unlink(path: Path) -> None:
    with suppress(OSError):
        path.unlink()


def _lock_file(path: Path, descriptor: int, description: str, stack: ExitStack) -> None:
    """Locks an open file, or binds a socket that `stack` closes where the file system has no locks."""
    try:
        if fcntl is None:
            raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise UserError(f"another process is at work on {description}") from None
    except OSError as error:
        if error.errno not in LOCKS_UNSUPPORTED:
            raise
        if sys.platform.startswith("linux"):
            stack.enter_context(_bind_socket(descriptor, description))
        print(
            f"note: the file system of {path.parent} has no locks, so processes of other machines are not kept "
            "from working there at the same time",
            file=sys.stderr,
        )


def _bind_socket(descriptor: int, description: str) -> socket.socket:
    """Binds an abstract socket named by a file's device and inode, which one process of a Linux machine can do."""
    status = os.fstat(descriptor)
    unix_socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        unix_socket.bind(f"\0jaxaudit-folder-{status.st_dev}-{status.st_ino}")
    except OSError as error:
        unix_socket.close()
        if error.errno != errno.EADDRINUSE:
            raise
        raise UserError(f"another process is at work on {description}") from None
    return unix_socket


def write_text(path: Path, text: str) -> None:
    """Writes a text file under a temporary name and renames it, so that it appears complete or not at all.

    A link at `path` is replaced by the file, and its target is not touched.
    """
    unfinished = path.with_name(f"{UNFINISHED}{os.getpid()}-{path.name}")
    remove(unfinished)
    with unfinished.open("x", encoding="utf-8") as file:
        file.write(text)
    os.replace(unfinished, path)


def read_text(path: Path, max_bytes: int = MAX_FILE_BYTES) -> str:
    """Returns the text of a UTF-8 file.

    Raises:
      UserError: the file has more than `max_bytes` bytes, is not UTF-8, or is not a regular file.
      OSError: the file cannot be read.
    """
    check_regular(path)
    with path.open("rb") as file:
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise UserError(f"{path} is larger than {max_bytes >> 20} MiB, the most that is read of such a file")
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is damaged: it is not UTF-8 text (byte {error.start})") from None


def read_json(path: Path) -> Any:
    """Returns the value in a JSON file; raises as `read_text`, and UserError if the file is not JSON."""
    try:
        text = read_text(path)
        value = json.loads(text)
        if "\\ud" in text or "\\uD" in text:  # a lone surrogate cannot be written to any file later
            json.dumps(value, ensure_ascii=False).encode()
        return value
    except UserError:
        raise
    except RecursionError:
        raise UserError(f"{path} is damaged: it is nested too deeply") from None
    except UnicodeEncodeError:
        raise UserError(f"{path} is damaged: it has half a character (a lone surrogate)") from None
    except ValueError:
        raise UserError(f"{path} is damaged: it is not JSON") from None


def read_object(path: Path) -> dict[str, Any]:
    """Returns the JSON object in a file; raises as `read_json`, and UserError if the file holds another value."""
    value = read_json(path)
    if not isinstance(value, dict):
        raise UserError(f"{path} is damaged: it is not a JSON object")
    return value


def parse_toml(text: str, source: str) -> dict[str, Any]:
    """Returns the tables of a TOML document.

    Keys of more than `MAX_KEY_PARTS` dotted parts are refused, since the time to parse them grows quadratically.

    Args:
      text: the document.
      source: where the document was read, with which error messages start.

    Raises:
      UserError: the text is not TOML, is nested too deeply, or has a key of too many parts.
    """
    if _DEEP_KEY.search(text):
        raise UserError(f"{source} has a key of more than {MAX_KEY_PARTS} dotted parts")
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise UserError(f"{source} is nested too deeply") from None
    except ValueError as error:
        raise UserError(f"{source} is not TOML: {error}") from None


def check_regular(path: Path) -> None:
    """Raises UserError if a path exists and is not a regular file but a folder, a pipe or a device."""
    if path.exists() and not path.is_file():
        raise UserError(f"{path} is not a file")


def check_path_encoding(path: Path) -> None:
    """Raises UserError if a folder's path is not UTF-8, since checkpoints cannot be written there."""
    try:
        str(path.absolute()).encode()
    except UnicodeEncodeError:
        shown = os.fsencode(path).decode("utf-8", "backslashreplace")
        raise UserError(f"the path {shown} is not UTF-8 text, and checkpoints need one that is") from None


def check_contents(path: Path) -> None:
    """Raises UserError if a folder contains symbolic links, pipes, sockets or devices, at any depth.

    Without them, reading and writing files in the folder never leaves it. The folder itself may be a symbolic link.
    """
    for entry in _walk(path):
        if entry.is_symlink():
            raise UserError(f"{entry.path} is a link, and a run's folder may not have links inside")
        mode = entry.stat(follow_symlinks=False).st_mode
        if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
            raise UserError(f"{entry.path} is neither a file nor a folder, and a run's folder may hold nothing else")


def _walk(path: Path | str) -> Iterator[os.DirEntry[str]]:
    folders = [os.fspath(path)]
    while folders:
        try:
            with os.scandir(folders.pop()) as entries:
                for entry in entries:
                    yield entry
                    if entry.is_dir(follow_symlinks=False):
                        folders.append(entry.path)
        except FileNotFoundError:  # another process has just removed it
            continue
