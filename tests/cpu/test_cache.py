"""Generated source as files: private, whole, named by their content, and never run in place of the text asked for."""

import os
import stat
import sys
import threading
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest

from warpnorm import settings
from warpnorm.codegen import cache
from warpnorm.folder import is_sealed

numbers = count()


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    with settings.override(cache_dir=tmp_path / "deep" / "cache"):
        yield tmp_path / "deep" / "cache"


@pytest.fixture
def source() -> str:
    """A text that no other test has loaded."""
    return f'"""{os.getpid()} {next(numbers)}"""\nVALUE = object()\n\n\ndef answer():\n    return 42\n'


def forget(source: str) -> None:
    cache._modules.pop(source)


def test_file_holds_the_source_and_is_the_users_alone(folder: Path, source: str) -> None:
    before = os.umask(0)
    try:
        module = cache.load(source)
    finally:
        os.umask(before)
    (path,) = folder.iterdir()
    assert path.read_text() == source
    assert module.answer() == 42
    assert Path(module.__file__ or "") == path
    assert module.answer.__code__.co_filename == str(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_same_source_is_the_same_module(folder: Path, source: str) -> None:
    assert cache.load(source) is cache.load(str(source))
    other = cache.load(source + "# another\n")
    assert other is not cache.load(source)
    assert len(list(folder.iterdir())) == 2


def test_next_process_finds_the_file_and_leaves_it(folder: Path, source: str) -> None:
    first = cache.load(source)
    (path,) = folder.iterdir()
    before = path.stat()
    forget(source)
    second = cache.load(source)
    assert second is not first
    assert second.answer() == 42
    (path,) = folder.iterdir()
    assert (path.stat().st_ino, path.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


@pytest.mark.parametrize(
    "foreign",
    [
        pytest.param(b"raise SystemExit('ran what it found')\n", id="foreign"),
        pytest.param(b"", id="emptied"),
        pytest.param(b'"""cut of', id="cut_off"),
        pytest.param(b"\xff\xfe\x00\xff", id="not_text"),
    ],
)
def test_damaged_file_is_rewritten_and_never_run(folder: Path, source: str, foreign: bytes) -> None:
    cache.load(source)
    (path,) = folder.iterdir()
    path.write_bytes(foreign)
    forget(source)
    assert cache.load(source).answer() == 42
    assert path.read_text() == source
    assert list(folder.iterdir()) == [path]


def test_file_changed_behind_our_back_is_never_run(folder: Path, source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between writing and running, that is: what runs is the text, not the file."""

    def replace(temporary: str, path: Path) -> None:
        os.rename(temporary, path)
        path.write_text("raise SystemExit('ran what it found')")

    monkeypatch.setattr(os, "replace", replace)
    assert cache.load(source).answer() == 42


def test_bytecode_beside_the_file_is_never_run(folder: Path, source: str) -> None:
    cache.load(source)
    (path,) = folder.iterdir()
    bytecode = folder / "__pycache__" / f"{path.stem}.{sys.implementation.cache_tag}.pyc"
    bytecode.parent.mkdir()
    bytecode.write_bytes(b"anything")
    forget(source)
    assert cache.load(source).answer() == 42
    assert bytecode.read_bytes() == b"anything"


def test_a_pipe_in_place_of_a_file_is_not_waited_for(folder: Path, source: str) -> None:
    cache.load(source)
    (path,) = folder.iterdir()
    path.unlink()
    os.mkfifo(path)
    assert not is_sealed(path)
    forget(source)
    assert cache.load(source).answer() == 42
    assert path.read_text() == source


def test_link_to_a_foreign_file_is_replaced_not_followed(folder: Path, source: str, tmp_path: Path) -> None:
    cache.load(source)
    (path,) = folder.iterdir()
    precious = tmp_path / "precious"
    precious.write_text("keep me")
    path.unlink()
    path.symlink_to(precious)
    forget(source)
    cache.load(source)
    assert precious.read_text() == "keep me"
    assert not path.is_symlink()
    assert path.read_text() == source


def test_file_appears_whole_or_not_at_all(folder: Path, source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is put in place is complete; where it cannot be, no trace is left in the folder."""
    moved = []

    def replace(temporary: str, path: Path) -> None:
        moved.append(Path(temporary).read_text())
        assert not Path(path).exists()
        assert Path(temporary).parent == Path(path).parent, "a rename is atomic inside one folder"
        if len(moved) == 1:
            raise OSError("disk full")
        os.rename(temporary, path)

    monkeypatch.setattr(os, "replace", replace)
    module = cache.load(source)
    assert moved == [source, source]
    assert list(folder.iterdir()) == []
    assert module.answer() == 42
    assert not Path(module.__file__ or "").is_relative_to(folder)


def test_unwritable_folder_is_replaced_by_a_private_one(tmp_path: Path, source: str) -> None:
    (tmp_path / "file").write_text("in the way")
    with settings.override(cache_dir=tmp_path / "file" / "cache"):
        module = cache.load(source)
    path = Path(module.__file__ or "")
    assert module.answer() == 42
    assert path.read_text() == source
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


def test_folder_in_the_place_of_the_file_is_walked_around(folder: Path, source: str) -> None:
    cache.load(source)
    (path,) = folder.iterdir()
    path.unlink()
    path.mkdir()
    forget(source)
    assert cache.load(source).answer() == 42
    assert list(folder.iterdir()) == [path]


def test_threads_get_one_module(folder: Path, source: str) -> None:
    slow = source + "import time\n\ntime.sleep(0.05)\n"
    barrier = threading.Barrier(8)
    found = []

    def load() -> None:
        barrier.wait()
        found.append(cache.load(slow))

    threads = [threading.Thread(target=load) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8
    assert len({id(module.VALUE) for module in found}) == 1


def test_source_that_fails_is_not_remembered(folder: Path, source: str) -> None:
    failing = source + "import warpnorm_is_not_ready\n"
    with pytest.raises(ModuleNotFoundError):
        cache.load(failing)
    with pytest.raises(ModuleNotFoundError):
        cache.load(failing)
