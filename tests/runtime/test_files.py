"""Folders are claimed by one process at a time, files are replaced atomically, and nothing outside is changed."""

import errno
import os
import signal
import subprocess
import sys
import time

import pytest

from jaxaudit.runtime import files
from jaxaudit.runtime.errors import UserError
from jaxaudit.runtime.files import LOCK, UNFINISHED, check_contents, claimed, locked, write_text

CLAIM_SCRIPT = """
import sys, time
from pathlib import Path
from jaxaudit.runtime.files import claimed
with claimed(Path(sys.argv[1])) as claim:
    Path(sys.argv[1], "theirs").write_text("x")
    if "keep" in sys.argv:
        claim.keep()
    print("claimed", flush=True)
    time.sleep(60)
"""


@pytest.fixture
def owner(tmp_path):
    """A process that has claimed a folder and written to it."""
    process = subprocess.Popen(
        [sys.executable, "-c", CLAIM_SCRIPT, str(tmp_path / "new")], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "claimed\n"
    yield process
    process.kill()
    process.wait()
    process.stdout.close()


def claim_and_fail(path, fill, keep=False):
    with claimed(path) as claim:
        fill(path)
        if keep:
            claim.keep()
        raise RuntimeError("no")


def test_a_claim_that_is_kept_leaves_the_folder_without_lock(tmp_path):
    with claimed(tmp_path / "a" / "new") as claim:
        (tmp_path / "a" / "new" / "mine").write_text("x")
        claim.keep()
    assert sorted(os.listdir(tmp_path / "a" / "new")) == ["mine"]


def test_a_failed_claim_removes_all_it_created(tmp_path):
    (tmp_path / "a").mkdir()

    def fill(path):
        (path / "deep").mkdir()
        (path / "deep" / "file").write_text("x")

    with pytest.raises(RuntimeError, match="no"):
        claim_and_fail(tmp_path / "a" / "b" / "new", fill)
    assert list(tmp_path.rglob("*")) == [tmp_path / "a"], "more or less than what the claim created was removed"


def test_a_failure_after_keep_leaves_everything(tmp_path):
    with pytest.raises(RuntimeError, match="no"):
        claim_and_fail(tmp_path / "new", lambda path: (path / "mine").write_text("x"), keep=True)
    assert os.listdir(tmp_path / "new") == ["mine"]


def test_a_failure_does_not_follow_links(tmp_path):
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "file").write_text("x")
    with pytest.raises(RuntimeError, match="no"):
        claim_and_fail(tmp_path / "new", lambda path: (path / "link").symlink_to(tmp_path / "theirs"))
    assert (tmp_path / "theirs" / "file").read_text() == "x"


def test_a_second_process_leaves_the_firsts_folder_unchanged(owner, tmp_path):
    with pytest.raises(UserError, match="another process is at work on the folder"), claimed(tmp_path / "new"):
        pytest.fail("the folder was claimed twice")
    assert (tmp_path / "new" / "theirs").exists()
    assert owner.poll() is None


def test_the_lock_of_a_dead_owner_is_free(owner, tmp_path):
    owner.kill()
    owner.wait()
    with (
        pytest.raises(UserError, match="exists and is not empty; and so on"),
        claimed(tmp_path / "new", hint="; and so on"),
    ):
        pass
    assert (tmp_path / "new" / "theirs").exists()
    with claimed(tmp_path / "new", is_leftover=lambda path: True):
        assert os.listdir(tmp_path / "new") == [LOCK]


def test_the_lock_of_a_stopped_owner_is_kept(owner, tmp_path):
    owner.send_signal(signal.SIGSTOP)
    with pytest.raises(UserError, match="another process"), claimed(tmp_path / "new", is_leftover=lambda path: True):
        pass
    owner.send_signal(signal.SIGCONT)


def test_unfinished_files_are_removed_at_the_next_claim(tmp_path):
    (tmp_path / f"{UNFINISHED}12-table.csv").write_text("half")
    (tmp_path / f"{UNFINISHED}folder").mkdir()
    with claimed(tmp_path) as claim:
        assert os.listdir(tmp_path) == [LOCK]
        claim.keep()


@pytest.mark.parametrize("make", [lambda path: path.write_text("x"), lambda path: path.symlink_to("gone")])
def test_paths_that_cannot_be_folders_are_refused(make, tmp_path):
    make(tmp_path / "new")
    with pytest.raises(UserError, match=r"is not a folder|cannot make the folder"), claimed(tmp_path / "new"):
        pass
    assert os.listdir(tmp_path) == ["new"]


def test_created_parents_are_removed_if_the_folder_cannot_be_created(tmp_path):
    with pytest.raises(UserError, match="cannot make the folder"), claimed(tmp_path / "a" / "b" / ("long" * 100)):
        pass
    assert os.listdir(tmp_path) == []


def test_a_name_that_is_not_utf_8_is_refused(tmp_path):
    folder = tmp_path / os.fsdecode(b"\xff")
    with pytest.raises(UserError, match=r"\\xff is not UTF-8"), claimed(folder):
        pass
    assert os.listdir(tmp_path) == []


def test_a_folder_that_vanishes_while_it_is_claimed_is_created_again(tmp_path, monkeypatch):
    """Another process, which had created the folder and failed, removes it before this process locks it."""
    original_open, calls = os.open, []

    def open_after_removal(path, *arguments):
        if str(path).endswith(LOCK) and not calls:
            calls.append(path)
            (tmp_path / "new").rmdir()
        return original_open(path, *arguments)

    monkeypatch.setattr(files.os, "open", open_after_removal)
    with claimed(tmp_path / "new") as claim:
        claim.keep()
    assert calls
    assert (tmp_path / "new").is_dir()


def test_a_lock_file_that_vanishes_while_it_is_locked_is_created_again(tmp_path, monkeypatch):
    """The previous owner removes its lock file after this process opened it.

    Other processes would lock another file.
    """
    original_flock, calls = files.fcntl.flock, []

    def flock_after_removal(descriptor, operation):
        if not calls:
            calls.append(descriptor)
            (tmp_path / LOCK).unlink()
        return original_flock(descriptor, operation)

    monkeypatch.setattr(files.fcntl, "flock", flock_after_removal)
    with locked(tmp_path, "it"):
        assert (tmp_path / LOCK).exists()
        with pytest.raises(UserError, match="another process is at work on it"), locked(tmp_path, "it"):
            pass
    assert os.listdir(tmp_path) == []


def test_a_file_system_without_locks_still_separates_local_processes(tmp_path, monkeypatch, capsys):
    """Processes of one machine exclude each other, and a note says that those of other machines do not."""

    def no_locks(descriptor, operation):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(files.fcntl, "flock", no_locks)
    with locked(tmp_path, "it"):
        assert "has no locks, so processes of other machines are not kept" in capsys.readouterr().err
        with pytest.raises(UserError, match="another process is at work on it"), locked(tmp_path, "it"):
            pass
    with locked(tmp_path, "it"):
        pass


def test_a_lock_that_is_a_link_is_refused(tmp_path):
    (tmp_path / "theirs").write_text("x")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / LOCK).symlink_to(tmp_path / "theirs")
    with pytest.raises(UserError, match="is a link"), locked(tmp_path / "run", "it"):
        pass
    assert (tmp_path / "theirs").read_text() == "x"


def test_only_one_of_ten_concurrent_processes_claims_a_folder(tmp_path):
    """The processes start within a tenth of a second of each other, depending on their imports."""
    new = str(tmp_path / "new")
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", CLAIM_SCRIPT, new, "keep"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for _ in range(10)
    ]
    deadline = time.monotonic() + 60
    while sum(process.poll() is None for process in processes) > 1 and time.monotonic() < deadline:
        time.sleep(0.02)
    (owner,) = [process for process in processes if process.poll() is None]
    owner.kill()
    outputs = [process.communicate() for process in processes]
    assert sum("claimed" in out for out, _ in outputs) == 1
    assert sum("another process is at work on the folder" in err for _, err in outputs) == 9
    assert (tmp_path / "new" / "theirs").exists()


def test_text_is_written_atomically_and_replaces_links(tmp_path):
    (tmp_path / "theirs").write_text("theirs")
    (tmp_path / "table").symlink_to(tmp_path / "theirs")
    (tmp_path / f"{UNFINISHED}{os.getpid()}-table").symlink_to(tmp_path / "theirs")
    write_text(tmp_path / "table", "mine")
    assert (tmp_path / "theirs").read_text() == "theirs"
    assert (tmp_path / "table").read_text() == "mine"
    assert not (tmp_path / "table").is_symlink()
    assert sorted(os.listdir(tmp_path)) == ["table", "theirs"]


def make_link(path, target):
    path.symlink_to(target)


def make_pipe(path, target):
    os.mkfifo(path)


@pytest.mark.parametrize(
    ("make", "words"), [(make_link, "is a link, and"), (make_pipe, "neither a file nor a folder")], ids=["link", "pipe"]
)
@pytest.mark.parametrize("location", ["top", "a/b/deep"])
def test_a_folder_with_links_or_pipes_is_refused(make, words, location, tmp_path):
    (tmp_path / "run" / location).parent.mkdir(parents=True)
    make(tmp_path / "run" / location, tmp_path)
    with pytest.raises(UserError, match=words):
        check_contents(tmp_path / "run")


def test_a_folder_may_be_a_link_and_may_contain_hard_links(tmp_path):
    (tmp_path / "run" / "a").mkdir(parents=True)
    (tmp_path / "run" / "a" / "file").write_text("x")
    os.link(tmp_path / "run" / "a" / "file", tmp_path / "run" / "file")
    (tmp_path / "link").symlink_to(tmp_path / "run")
    check_contents(tmp_path / "link")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"[" * 100_000 + b"]" * 100_000, "nested too deeply"),
        (b'{"a": "\xff"}', r"not UTF-8 text \(byte 7\)"),
        (b"{", "is not JSON"),
        (b"", "is not JSON"),
        (b"[1]", "is not a JSON object"),
        (rb'{"a": "\uD800"}', "half a character"),
        (b"{}" + b" " * files.MAX_FILE_BYTES, "is larger than 32 MiB"),
    ],
)
def test_what_is_no_json_object_is_refused(content, words, tmp_path):
    (tmp_path / "file.json").write_bytes(content)
    with pytest.raises(UserError, match=words):
        files.read_object(tmp_path / "file.json")


def test_a_pipe_is_refused_without_waiting(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UserError, match="is not a file"):
        files.read_text(tmp_path / "pipe")


@pytest.mark.parametrize(
    ("key", "is_refused"),
    [
        (".".join("a" * 65), True),
        (" . ".join(['"a b"', "'c.d'", "e-f"] * 22), True),
        (f"[{'.'.join('a' * 20_000)}]", True),
        (".".join("a" * 64), False),
        ('"' + "." * 5000 + '"', False),
    ],
)
def test_keys_with_many_parts_are_refused(key, is_refused):
    text = key if key.startswith("[") else f"{key} = 1"
    start = time.monotonic()
    if is_refused:
        with pytest.raises(UserError, match="here has a key of more than 64 dotted parts"):
            files.parse_toml(text, "here")
    else:
        assert files.parse_toml(text, "here")
    assert time.monotonic() - start < 1


def test_a_megabyte_of_any_text_is_searched_fast():
    for text in (
        "a" * 10**6,
        "a." * 30 * 10_000,
        '"' * 10**6,
        "a " * 500_000,
        f"x = [{'0.5, ' * 200_000}]",
        "'a." * 300_000,
    ):
        start = time.monotonic()
        files._DEEP_KEY.search(text)
        assert time.monotonic() - start < 2, text[:10]
