"""Files and folders on disk that other processes, and other people, may have written to.

One process at a time fills a folder, every file appears whole, no symbolic link inside a folder is followed, and no
more of a file is read than `MOST_BYTES`.
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
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxaudit.runtime.errors import UserError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

UNFINISHED = ".unfinished-"
"""How the name of a file or folder begins while it is written. A killed process leaves such names behind."""

LOCK = ".lock"
"""The file in a folder that is locked by the process at work there. Removed when that process is done."""

MOST_BYTES = 2**25
"""The size of the largest text or JSON file that is read. The plan of a million lanes is a third as large."""

DEEPEST = 64
"""Parts of a dotted key in TOML. A spec's keys have one."""

_KEY_AND_DOT = r"""(?:[\w-]++|"[^"\n]*+"|'[^'\n]*+')[ \t]*+\.[ \t]*+"""
_DEEP_KEY = re.compile(rf"""(?<![\w"'-])(?:{_KEY_AND_DOT}){{{DEEPEST}}}""", re.ASCII)

TURNS = 10
"""How often a folder is made or locked again that other processes have removed meanwhile."""

NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EBADF, errno.EINVAL}
"""What a file system without locks answers when it is asked for one."""


@dataclass
class Claim:
    """A folder that this process has claimed.

    Attributes:
      kept: whether what is in the folder stays there if an exception follows.
    """

    kept: bool = False

    def keep(self) -> None:
        """Keeps the folder even if an exception follows."""
        self.kept = True


@contextmanager
def claimed(path: Path, *, is_leftover: Callable[[Path], bool] | None = None, hint: str = "") -> Iterator[Claim]:
    """Claims a new or empty folder for this process, which is locked until the block ends.

    If the block ends before it has called the claim's `keep`, everything in the folder is removed, and so are the
    folders that had to be made. Nothing that another process made is ever removed.

    Args:
      path: the folder.
      is_leftover: whether the contents of a folder that no process has locked were left by a killed process and can
        be removed. By default: whether all names begin with `UNFINISHED`.
      hint: the end of the sentence for a folder that is not empty.

    Raises:
      UserError: the folder cannot be made, is not empty, its name is not UTF-8, or another process is at work on it.
    """
    check_name(path)
    if os.path.exists(path) and not path.is_dir():
        raise UserError(f"{path} exists and is not a folder")
    made = [p for p in (path.absolute(), *path.absolute().parents) if not os.path.exists(p)]
    try:
        lock = _lock(path, f"the folder {path}", make=True)
    except OSError as error:
        _remove_empty(made)
        raise UserError(f"cannot make the folder {path}: {error.strerror or error}") from None
    claim = Claim()
    try:
        _check_free(path, is_leftover or _only_unfinished, hint)
        try:
            yield claim
        finally:
            if not claim.kept:
                _remove_contents(path)
    finally:
        lock.release()
        if not claim.kept:
            _remove_empty(made)


def _remove_empty(folders: Iterable[Path]) -> None:
    for folder in folders:
        with suppress(OSError):  # it was not made, or another process uses it by now
            folder.rmdir()


def _check_free(path: Path, is_leftover: Callable[[Path], bool], hint: str) -> None:
    """Raises UserError unless a locked folder is empty or holds what a killed process left, which is removed."""
    if names(path):
        if not is_leftover(path):
            raise UserError(f"the folder {path} exists and is not empty{hint}")
        _remove_contents(path)


def _only_unfinished(path: Path) -> bool:
    return all(name.startswith(UNFINISHED) for name in names(path))


def names(path: Path) -> list[str]:
    """The names in a folder, without its lock's."""
    return [name for name in os.listdir(path) if name != LOCK]


def _remove_contents(path: Path) -> None:
    for name in names(path):
        remove(path / name)


def remove(path: Path) -> None:
    """Removes a file, a link or a folder with all it holds; a link's target is left alone."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


@contextmanager
def locked(path: Path, what: str) -> Iterator[None]:
    """Locks an existing folder while inside. The lock ends with the process, however that ends.

    Args:
      path: the folder.
      what: what the folder is, for the message.

    Raises:
      UserError: another process has locked it.
      OSError: the folder is not there or cannot be written to.
    """
    lock = _lock(path, what)
    try:
        yield
    finally:
        lock.release()


class _Lock:
    """A lock that this process has: an open file, or a socket where the file system has no locks."""

    def __init__(self, path: Path, descriptor: int, bound: socket.socket | None = None):
        self._path, self._descriptor, self._bound = path, descriptor, bound

    def release(self) -> None:
        with suppress(OSError):
            self._path.unlink()
        os.close(self._descriptor)
        if self._bound is not None:
            self._bound.close()


def _lock(path: Path, what: str, make: bool = False) -> _Lock:
    place = path / LOCK
    for turn in range(TURNS):
        try:
            if make:
                path.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(place, os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o666)
        except FileNotFoundError:
            if make and turn < TURNS - 1:  # another process has just removed the folder
                continue
            raise
        except OSError as error:
            if error.errno == errno.ELOOP:
                raise UserError(f"{place} is a link, which jaxaudit does not follow") from None
            raise
        lock = _lock_file(place, descriptor, what)
        if lock is not None:
            return lock
    raise UserError(f"another process is at work on {what}")


def _lock_file(place: Path, descriptor: int, what: str) -> _Lock | None:
    """The lock of an open file; None where that file has been removed meanwhile and another must be opened."""
    try:
        bound = None
        try:
            if fcntl is None:
                raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"another process is at work on {what}") from None
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise
            bound = _bound(descriptor, what)
            print(
                f"note: the file system of {place.parent} has no locks, so processes of other machines are not kept "
                "from working there at the same time",
                file=sys.stderr,
            )
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(descriptor), os.stat(place, follow_symlinks=False)):
                return _Lock(place, descriptor, bound)
    except BaseException:
        os.close(descriptor)
        raise
    os.close(descriptor)
    if bound is not None:
        bound.close()
    return None


def _bound(descriptor: int, what: str) -> socket.socket | None:
    """A socket bound to a name made of a file's numbers, which one process of a machine can have at a time (Linux)."""
    if not sys.platform.startswith("linux"):
        return None
    state = os.fstat(descriptor)
    bound = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        bound.bind(f"\0jaxaudit-folder-{state.st_dev}-{state.st_ino}")
    except OSError as error:
        bound.close()
        if error.errno != errno.EADDRINUSE:
            raise
        raise UserError(f"another process is at work on {what}") from None
    return bound


def write_text(path: Path, text: str) -> None:
    """Writes a text file beside its place, then puts it there: it appears whole or not at all.

    A link at `path` is replaced by the file, and its target is left alone.
    """
    unfinished = path.with_name(f"{UNFINISHED}{os.getpid()}-{path.name}")
    remove(unfinished)
    with unfinished.open("x", encoding="utf-8") as file:
        file.write(text)
    os.replace(unfinished, path)


def read_text(path: Path, most: int = MOST_BYTES) -> str:
    """The text of a UTF-8 file of at most `most` bytes.

    Raises:
      UserError: it is larger, not UTF-8, or no regular file, whose end may never come.
      OSError: it cannot be read.
    """
    check_regular(path)
    with path.open("rb") as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise UserError(f"{path} is larger than {most >> 20} MiB, which no such file is")
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is damaged: it is not UTF-8 text (byte {error.start})") from None


def read_json(path: Path) -> Any:
    """The value in a JSON file. Raises as `read_text`, and UserError where it is not JSON."""
    try:
        text = read_text(path)
        found = json.loads(text)
        if "\\ud" in text or "\\uD" in text:  # half a character cannot be written to any file
            json.dumps(found, ensure_ascii=False).encode()
        return found
    except UserError:
        raise
    except RecursionError:
        raise UserError(f"{path} is damaged: it is nested too deeply") from None
    except UnicodeEncodeError:
        raise UserError(f"{path} is damaged: it has half a character (a lone surrogate)") from None
    except ValueError:
        raise UserError(f"{path} is damaged: it is not JSON") from None


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file. Raises as `read_json`."""
    found = read_json(path)
    if not isinstance(found, dict):
        raise UserError(f"{path} is damaged: it is not a JSON object")
    return found


def parse_toml(text: str, place: str) -> dict[str, Any]:
    """The tables of a TOML document; `place` begins the message of the UserError where it is none.

    Keys of more than `DEEPEST` dotted parts are refused, for what parsing them takes grows with their square.
    """
    if _DEEP_KEY.search(text):
        raise UserError(f"{place} has a key of more than {DEEPEST} dotted parts")
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise UserError(f"{place} is nested too deeply") from None
    except ValueError as error:
        raise UserError(f"{place} is not TOML: {error}") from None


def check_regular(path: Path) -> None:
    """Raises UserError where there is something that is not a regular file: a folder, a pipe, a device."""
    if path.exists() and not path.is_file():
        raise UserError(f"{path} is not a file")


def check_name(path: Path) -> None:
    """Raises UserError where a folder's path is not UTF-8: checkpoints cannot be written there."""
    try:
        str(path.absolute()).encode()
    except UnicodeEncodeError:
        shown = os.fsencode(path).decode("utf-8", "backslashreplace")
        raise UserError(f"the path {shown} is not UTF-8 text, and checkpoints need one that is") from None


def check_contents(path: Path) -> None:
    """Raises UserError where a folder has anything inside but files and folders: links, pipes, sockets, devices.

    What is read from a folder, or written to it, then stays in it. The folder itself may be a link.
    """
    for entry in _walk(path):
        if entry.is_symlink():
            raise UserError(f"{entry.path} is a link, and a run's folder may not have links inside")
        mode = entry.stat(follow_symlinks=False).st_mode
        if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
            raise UserError(f"{entry.path} is neither a file nor a folder, and a run's folder may hold nothing else")


def _walk(path: Path | str) -> Iterator[os.DirEntry[str]]:
    waiting = [os.fspath(path)]
    while waiting:
        try:
            with os.scandir(waiting.pop()) as entries:
                for entry in entries:
                    yield entry
                    if entry.is_dir(follow_symlinks=False):
                        waiting.append(entry.path)
        except FileNotFoundError:  # another process has just removed it
            continue
