"""What goes wrong around a call, brought about on purpose: several threads and processes at once, a cache folder that is
read-only, full, deleted or damaged, forks, interrupts. Each ends right or in one error."""

import ctypes
import errno
import os
import shutil
import signal
import subprocess
import tempfile
import threading
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import warpnorm
from warpnorm import folder, routing, settings
from warpnorm.codegen import cache
from warpnorm.cpu import build
from warpnorm.trace import capture

pytestmark = pytest.mark.skipif(not routing.has_compiler(), reason="native code needs a compiler")

COLS = 2048
numbers = count()


def number() -> float:
    """One that no other test, process or run has code for."""
    return 1.0 + (os.getpid() * 1000 + next(numbers)) * 1e-9


def first_call(scale: float | None = None) -> Callable[[], bool]:
    """A call of a function that nobody has called, and whether it is right."""
    scale = number() if scale is None else scale
    x, weight = torch.randn(4, COLS), torch.randn(COLS)

    def function(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(torch.sigmoid(x) * scale, (COLS,), weight)

    fused = warpnorm.fuse(function)

    def is_right() -> bool:
        return torch.allclose(fused(x, weight), function(x, weight), rtol=1e-5, atol=1e-6)

    return is_right


def source(answer: int = 42) -> str:
    return f"/* {os.getpid()} {next(numbers)} */ int answer(void) {{ return {answer}; }}"


def in_child(work: Callable[[], object]) -> int:
    """Forks; the child ends with 0 where `work` returns true."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            status = 0 if work() else 2
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    return child


def status_of(child: int) -> int:
    """Of its end; it is stopped where it never ends."""
    timer = threading.Timer(300, os.kill, (child, signal.SIGKILL))
    timer.start()
    try:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    finally:
        timer.cancel()


def left_behind(home: Path) -> list[str]:
    return [path.name for path in home.iterdir() if path.suffix == ".tmp" or path.name.startswith("build-")]


# Several at once


def test_two_threads_make_the_first_call(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built = []
    make = build._build
    monkeypatch.setattr(build, "_build", lambda text, path: built.append(text) or make(text, path))
    is_right, barrier, found = first_call(), threading.Barrier(2), []

    def work() -> None:
        barrier.wait()
        found.append(is_right())

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [True, True]
    assert len(built) == len(set(built)) == 1, "the same code is built once"


def test_four_processes_make_the_first_call(home: Path) -> None:
    is_right = first_call()
    ready, go = os.pipe()

    def work() -> bool:
        os.close(go)
        os.read(ready, 1)  # which ends for all at the same moment
        return is_right()

    children = [in_child(work) for _ in range(4)]
    os.close(go)
    os.close(ready)
    assert [status_of(child) for child in children] == [0] * 4
    assert left_behind(home) == []
    libraries = list(home.glob("native_*.so"))
    assert len(libraries) == 1
    assert all(map(folder.is_sealed, libraries))


# The cache folder


@dataclass(frozen=True)
class Fault:
    """`inject` breaks the folder; `is_kept`: what is built lies there all the same."""

    name: str
    inject: Callable[[Path, pytest.MonkeyPatch], None]
    why: str
    is_kept: bool = False


def refuse(home: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    """No file or folder can be made in the folder."""
    for name in ("mkdtemp", "mkstemp"):
        make = getattr(tempfile, name)

        def refusing(suffix: Any = None, prefix: Any = None, dir: Any = None, make: Any = make) -> Any:
            if dir is not None and Path(dir).is_relative_to(home):
                raise OSError(code, os.strerror(code))
            return make(suffix, prefix, dir)

        monkeypatch.setattr(tempfile, name, refusing)


def fill(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files can be made, but hold nothing; the compiler, which finds out by itself, fails with a status alone."""
    write, compile = Path.write_bytes, subprocess.run

    def no_room(path: Path, content: bytes) -> int:
        if path.is_relative_to(home):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(path, content)

    def fail(command: list[str], **kwargs: Any) -> subprocess.CompletedProcess[str]:
        is_there = any(word.startswith(str(home)) for word in command)
        return subprocess.CompletedProcess(command, 1, "", "error: ?") if is_there else compile(command, **kwargs)

    monkeypatch.setattr(Path, "write_bytes", no_room)
    monkeypatch.setattr(build.subprocess, "run", fail)


def delete(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compile = subprocess.run

    def deleting(command: list[str], **kwargs: Any) -> subprocess.CompletedProcess[str]:
        done = compile(command, **kwargs)
        shutil.rmtree(home, ignore_errors=True)
        return done

    monkeypatch.setattr(build.subprocess, "run", deleting)


def forbid_running(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load = ctypes.CDLL

    def refusing(path: str, *args: Any) -> ctypes.CDLL:
        if path.startswith(str(home)):
            raise OSError("failed to map segment from shared object")
        return load(path, *args)

    monkeypatch.setattr(build.ctypes, "CDLL", refusing)


def put_a_file(home: Path, _: pytest.MonkeyPatch) -> None:
    shutil.rmtree(home)
    home.write_text("in the way")


FAULTS = [
    Fault("read_only", partial(refuse, code=errno.EROFS), "a home on a disk that is read-only"),
    Fault("full", partial(refuse, code=errno.ENOSPC), "no room for one more file"),
    Fault("full_while_compiling", fill, "the compiler says so in the user's language"),
    Fault("deleted_while_compiling", delete, "somebody cleans up"),
    Fault("deleted_before", lambda home, _: shutil.rmtree(home), "it is made again", is_kept=True),
    Fault("not_a_folder", put_a_file, "a file has its name"),
    Fault("nothing_is_run_from_it", forbid_running, "a home that is mounted so", is_kept=True),
]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda f: f.name)
def test_a_folder_that_fails(fault: Fault, home: Path, monkeypatch: pytest.MonkeyPatch, fresh: None) -> None:
    assert first_call()(), "the folder is in use"
    fault.inject(home, monkeypatch)
    scale = number()
    before = set(home.glob("native_*"))
    assert first_call(scale)(), fault.why
    monkeypatch.undo()
    assert bool(set(home.glob("native_*")) - before) == fault.is_kept
    assert not home.is_dir() or left_behind(home) == []
    with settings.override(cache_dir=home):
        assert build.load(source()).answer() == 42, "and again"


def test_a_folder_that_cannot_be_made_is_told_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fresh: None
) -> None:
    """Every process compiles anew then, which nobody would know."""
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setattr(folder, "_told", set())
    with settings.override(cache_dir=tmp_path / "file" / "cache"):
        with pytest.warns(RuntimeWarning, match="cannot be made .*: name another in WARPNORM_CACHE_DIR"):
            assert first_call()()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert first_call()()


def test_no_folder_anywhere(home: Path, monkeypatch: pytest.MonkeyPatch, fresh: None) -> None:
    """Neither the cache folder nor a temporary one: by PyTorch's operators, and `explain` says why."""

    def refusing(*_: Any, **__: Any) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(folder, "_private", None)
    monkeypatch.setattr(tempfile, "mkdtemp", refusing)
    monkeypatch.setattr(tempfile, "mkstemp", refusing)
    scale = number()
    assert first_call(scale)()
    found = warpnorm.explain(lambda x: F.rms_norm(x * scale, (COLS,)), torch.randn(2, COLS))
    assert found.route.startswith("as plain PyTorch, because native code does not do it")
    assert os.strerror(errno.EROFS) in found.route
    module = cache.load(f"'''{number()}'''\nANSWER = 42\n")
    assert module.ANSWER == 42, "generated source needs no file"


@dataclass(frozen=True)
class Damage:
    name: str
    content: Callable[[bytes], bytes]
    why: str


def other_library(_: bytes) -> bytes:
    """Whole, and with the function that is called."""
    with tempfile.TemporaryDirectory() as scratch:
        code, built = Path(scratch) / "code.c", Path(scratch) / "code.so"
        code.write_text("int answer(void) { return 41; }")
        subprocess.run([str(build.compiler()), "-shared", "-fPIC", str(code), "-o", str(built)], check=True)
        return built.read_bytes()


DAMAGES = [
    Damage("empty", lambda whole: b"", "a machine that went down"),
    Damage("cut_early", lambda whole: whole[:600], "to load it would end the process"),
    Damage("cut_in_half", lambda whole: whole[: len(whole) // 2], "to load it would end the process"),
    Damage("cut_late", lambda whole: whole[:-1], "its last page is there"),
    Damage("one_byte_off", lambda whole: whole[:4096] + bytes([whole[4096] ^ 1]) + whole[4097:], "a failing disk"),
    Damage("text", lambda whole: b"not a library", "foreign"),
    Damage("other_library", other_library, "foreign, and it would load"),
]


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda d: d.name)
def test_a_damaged_library_is_built_anew(damage: Damage, home: Path) -> None:
    """In a child, which it might end."""
    text = source()

    def build_it() -> bool:
        return build.load(text).answer() == 42

    assert status_of(in_child(build_it)) == 0
    (path,) = home.iterdir()
    whole = path.read_bytes()
    path.write_bytes(damage.content(whole))
    assert path.read_bytes() != whole
    assert status_of(in_child(build_it)) == 0, damage.why
    assert list(home.iterdir()) == [path]
    assert folder.is_sealed(path)


def test_a_whole_library_is_not_built_again(home: Path) -> None:
    text = source()
    assert status_of(in_child(lambda: build.load(text))) == 0
    (path,) = home.iterdir()
    before = path.stat()
    assert build.load(text).answer() == 42
    assert (path.stat().st_ino, path.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


# Forks


def test_fork_while_other_threads_have_every_lock(home: Path) -> None:
    """They stay with the parent, and would never let go."""
    held, done = threading.Event(), threading.Event()

    def hold() -> None:
        with build._lock, cache._lock, capture._lock, folder._lock:
            held.set()
            done.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    try:
        is_right = first_call()
        children = [in_child(is_right), in_child(lambda: cache.load(f"'''{number()}'''\nANSWER = 42\n").ANSWER == 42)]
        assert [status_of(child) for child in children] == [0, 0]
    finally:
        done.set()
        thread.join()
    assert is_right(), "and the parent goes on"


def test_a_child_leaves_the_private_folder_of_its_parent() -> None:
    mine = folder.private()

    def work() -> bool:
        theirs = folder.private()
        folder._remove(os.getpid(), theirs)  # as at its end
        folder._remove(os.getppid(), mine)
        return theirs != mine and not theirs.exists()

    assert status_of(in_child(work)) == 0
    assert mine.is_dir()
    assert folder.private() == mine


# Interrupts


def test_an_interrupt_while_the_compiler_runs(home: Path, tmp_path: Path, fresh: None) -> None:
    """It comes through, nothing is left behind, and the next call is right: by native code."""
    script, flag = tmp_path / "cc", tmp_path / "flag"
    script.write_text(
        f'#!/bin/sh\n[ -e {flag} ] && exec {build.compiler()} "$@"\n: > {flag}\nkill -INT $PPID\nexec sleep 30\n'
    )
    script.chmod(0o755)
    command = build._command()
    is_right = first_call()

    def work() -> bool:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        build._command = lambda: (str(script), *command[1:])  # in the child alone
        try:
            is_right()
        except KeyboardInterrupt:
            assert left_behind(home) == []
            assert not list(home.glob("native_*"))
            return is_right() and len(list(home.glob("native_*"))) == 1
        return False

    assert status_of(in_child(work)) == 0
