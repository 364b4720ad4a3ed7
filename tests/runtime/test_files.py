"""Folders are claimed by one process at a time, files appear whole, and nothing outside a folder is touched."""

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

CLAIMING = """
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
    """Another process that has claimed a folder and written to it."""
    process = subprocess.Popen(
        [sys.executable, "-c", CLAIMING, str(tmp_path / "new")], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "claimed\n"
    yield process
    process.kill()
    process.wait()
    process.stdout.close()


def claim_and_fail(path, fill, kept=False):
    with claimed(path) as claim:
        fill(path)
        if kept:
            claim.keep()
        raise RuntimeError("no")


def test_a_claim_that_is_kept(tmp_path):
    with claimed(tmp_path / "a" / "new") as claim:
        (tmp_path / "a" / "new" / "mine").write_text("x")
        claim.keep()
    assert sorted(os.listdir(tmp_path / "a" / "new")) == ["mine"]


def test_what_a_failure_leaves(tmp_path):
    (tmp_path / "a").mkdir()

    def fill(path):
        (path / "deep").mkdir()
        (path / "deep" / "file").write_text("x")

    with pytest.raises(RuntimeError, match="no"):
        claim_and_fail(tmp_path / "a" / "b" / "new", fill)
    assert list(tmp_path.rglob("*")) == [tmp_path / "a"], "all that was made is gone, and no more"


def test_a_failure_after_it_was_kept_leaves_everything(tmp_path):
    with pytest.raises(RuntimeError, match="no"):
        claim_and_fail(tmp_path / "new", lambda path: (path / "mine").write_text("x"), kept=True)
    assert os.listdir(tmp_path / "new") == ["mine"]


def test_a_failure_does_not_follow_links(tmp_path):
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "file").write_text("x")
    with pytest.raises(RuntimeError, match="no"):
        claim_and_fail(tmp_path / "new", lambda path: (path / "link").symlink_to(tmp_path / "theirs"))
    assert (tmp_path / "theirs" / "file").read_text() == "x"


def test_the_second_leaves_the_firsts_folder_alone(owner, tmp_path):
    with pytest.raises(UserError, match="another process is at work on the folder"), claimed(tmp_path / "new"):
        pytest.fail("it was claimed")
    assert (tmp_path / "new" / "theirs").exists()
    assert owner.poll() is None


def test_a_dead_owner_keeps_no_lock(owner, tmp_path):
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


def test_a_stopped_owner_keeps_its_lock(owner, tmp_path):
    owner.send_signal(signal.SIGSTOP)
    with pytest.raises(UserError, match="another process"), claimed(tmp_path / "new", is_leftover=lambda path: True):
        pass
    owner.send_signal(signal.SIGCONT)


def test_what_was_being_written_is_left_over(tmp_path):
    (tmp_path / f"{UNFINISHED}12-table.csv").write_text("half")
    (tmp_path / f"{UNFINISHED}folder").mkdir()
    with claimed(tmp_path) as claim:
        assert os.listdir(tmp_path) == [LOCK]
        claim.keep()


@pytest.mark.parametrize("make", [lambda path: path.write_text("x"), lambda path: path.symlink_to("gone")])
def test_what_cannot_be_a_folder(make, tmp_path):
    make(tmp_path / "new")
    with pytest.raises(UserError, match=r"is not a folder|cannot make the folder"), claimed(tmp_path / "new"):
        pass
    assert os.listdir(tmp_path) == ["new"]


def test_parents_that_were_made_are_removed_where_the_folder_cannot_be(tmp_path):
    with pytest.raises(UserError, match="cannot make the folder"), claimed(tmp_path / "a" / "b" / ("long" * 100)):
        pass
    assert os.listdir(tmp_path) == []


def test_a_name_that_is_not_utf_8(tmp_path):
    place = tmp_path / os.fsdecode(b"\xff")
    with pytest.raises(UserError, match=r"\\xff is not UTF-8"), claimed(place):
        pass
    assert os.listdir(tmp_path) == []


def test_a_folder_that_vanishes_while_it_is_claimed_is_made_again(tmp_path, monkeypatch):
    """Another process, which had made the folder and failed, removes it between its making and its locking here."""
    before, calls = os.open, []

    def opened(path, *arguments):
        if str(path).endswith(LOCK) and not calls:
            calls.append(path)
            (tmp_path / "new").rmdir()
        return before(path, *arguments)

    monkeypatch.setattr(files.os, "open", opened)
    with claimed(tmp_path / "new") as claim:
        claim.keep()
    assert calls
    assert (tmp_path / "new").is_dir()


def test_a_lock_that_vanishes_while_it_is_taken_is_no_lock(tmp_path, monkeypatch):
    """The one who had it removes its file between the opening and the locking here: others would lock another file."""
    before, calls = files.fcntl.flock, []

    def locking(descriptor, how):
        if not calls:
            calls.append(descriptor)
            (tmp_path / LOCK).unlink()
        return before(descriptor, how)

    monkeypatch.setattr(files.fcntl, "flock", locking)
    with locked(tmp_path, "it"):
        assert (tmp_path / LOCK).exists()
        with pytest.raises(UserError, match="another process is at work on it"), locked(tmp_path, "it"):
            pass
    assert os.listdir(tmp_path) == []


def test_a_file_system_without_locks(tmp_path, monkeypatch, capsys):
    """Processes of one machine are kept apart all the same, and a note says that others are not."""

    def refused(descriptor, how):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(files.fcntl, "flock", refused)
    with locked(tmp_path, "it"):
        assert "has no locks, so processes of other machines are not kept" in capsys.readouterr().err
        with pytest.raises(UserError, match="another process is at work on it"), locked(tmp_path, "it"):
            pass
    with locked(tmp_path, "it"):
        pass


def test_a_lock_that_is_a_link(tmp_path):
    (tmp_path / "theirs").write_text("x")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / LOCK).symlink_to(tmp_path / "theirs")
    with pytest.raises(UserError, match="is a link"), locked(tmp_path / "run", "it"):
        pass
    assert (tmp_path / "theirs").read_text() == "x"


def test_ten_at_once_one_has_it(tmp_path):
    """Each starts within a tenth of a second of the others, as its imports happen to take."""
    new = str(tmp_path / "new")
    started = [
        subprocess.Popen(
            [sys.executable, "-c", CLAIMING, new, "keep"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for _ in range(10)
    ]
    deadline = time.monotonic() + 60
    while sum(one.poll() is None for one in started) > 1 and time.monotonic() < deadline:
        time.sleep(0.02)
    (owner,) = [one for one in started if one.poll() is None]
    owner.kill()
    ends = [one.communicate() for one in started]
    assert sum("claimed" in out for out, _ in ends) == 1
    assert sum("another process is at work on the folder" in err for _, err in ends) == 9
    assert (tmp_path / "new" / "theirs").exists()


def test_a_text_is_put_in_its_place_and_a_link_is_replaced(tmp_path):
    (tmp_path / "theirs").write_text("theirs")
    (tmp_path / "table").symlink_to(tmp_path / "theirs")
    (tmp_path / f"{UNFINISHED}{os.getpid()}-table").symlink_to(tmp_path / "theirs")
    write_text(tmp_path / "table", "mine")
    assert (tmp_path / "theirs").read_text() == "theirs"
    assert (tmp_path / "table").read_text() == "mine"
    assert not (tmp_path / "table").is_symlink()
    assert sorted(os.listdir(tmp_path)) == ["table", "theirs"]


def linked(place, target):
    place.symlink_to(target)


def piped(place, target):
    os.mkfifo(place)


@pytest.mark.parametrize(
    ("make", "words"), [(linked, "is a link, and"), (piped, "neither a file nor a folder")], ids=["link", "pipe"]
)
@pytest.mark.parametrize("where", ["top", "a/b/deep"])
def test_a_folder_holds_files_and_folders_alone(make, words, where, tmp_path):
    (tmp_path / "run" / where).parent.mkdir(parents=True)
    make(tmp_path / "run" / where, tmp_path)
    with pytest.raises(UserError, match=words):
        check_contents(tmp_path / "run")


def test_a_folder_may_be_a_link_and_have_hard_links_inside(tmp_path):
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
def test_what_is_no_object_of_json(content, words, tmp_path):
    (tmp_path / "file.json").write_bytes(content)
    with pytest.raises(UserError, match=words):
        files.read_object(tmp_path / "file.json")


def test_a_pipe_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UserError, match="is not a file"):
        files.read_text(tmp_path / "pipe")


@pytest.mark.parametrize(
    ("key", "refused"),
    [
        (".".join("a" * 65), True),
        (" . ".join(['"a b"', "'c.d'", "e-f"] * 22), True),
        (f"[{'.'.join('a' * 20_000)}]", True),
        (".".join("a" * 64), False),
        ('"' + "." * 5000 + '"', False),
    ],
)
def test_keys_of_many_parts(key, refused):
    text = key if key.startswith("[") else f"{key} = 1"
    begun = time.monotonic()
    if refused:
        with pytest.raises(UserError, match="here has a key of more than 64 dotted parts"):
            files.parse_toml(text, "here")
    else:
        assert files.parse_toml(text, "here")
    assert time.monotonic() - begun < 1


def test_a_megabyte_of_anything_is_looked_through_at_once():
    for text in (
        "a" * 10**6,
        "a." * 30 * 10_000,
        '"' * 10**6,
        "a " * 500_000,
        f"x = [{'0.5, ' * 200_000}]",
        "'a." * 300_000,
    ):
        begun = time.monotonic()
        files._DEEP_KEY.search(text)
        assert time.monotonic() - begun < 2, text[:10]
