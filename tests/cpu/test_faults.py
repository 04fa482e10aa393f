"""What goes wrong around a call, brought about on purpose: several threads and processes at once, a cache folder that is
read-only, full, deleted or damaged, forks, interrupts, memory that ends, other versions. Each ends right or in one error."""

import ctypes
import errno
import os
import shutil
import signal
import subprocess
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import warpnorm
from warpnorm import folder, pipeline, settings, version
from warpnorm.codegen import cache
from warpnorm.cpu import build, run
from warpnorm.trace import capture

pytestmark = pytest.mark.skipif(not pipeline.has_compiler(), reason="native code needs a compiler")

COLS = 2048
numbers = count()


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Path]:
    with settings.override(cache_dir=tmp_path / "cache"):
        yield tmp_path / "cache"


@pytest.fixture
def fresh() -> Iterator[None]:
    """Nothing that a test prepares is there for the next."""
    forget()
    yield
    forget()


def forget() -> None:
    run._function.cache_clear()
    pipeline.prepare_forward.cache_clear()
    pipeline.prepare_backward.cache_clear()


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


# Memory that ends


@dataclass(frozen=True)
class Scarce:
    """A batch norm in training, by native code."""

    name: str
    is_last: bool  # channels lie side by side
    is_fused: bool
    why: str


SCARCE = [
    Scarce("contiguous", False, False, "along rows"),
    Scarce("channels_last", True, False, "across rows: running statistics are written before the results"),
    Scarce("fused", False, True, "elements of a row are kept"),
]


class Allocations:
    """The one with this number fails, if there are so many."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.failing, self.seen = -1, 0
        for name in ("empty", "zeros", "empty_like"):
            monkeypatch.setattr(torch, name, partial(self.allocate, getattr(torch, name)))

    def allocate(self, make: Callable[..., torch.Tensor], *args: Any, **kwargs: Any) -> torch.Tensor:
        self.seen += 1
        if self.seen - 1 == self.failing:
            raise torch.OutOfMemoryError(f"allocation {self.failing}")
        return make(*args, **kwargs)

    def fail(self, which: int) -> None:
        self.failing, self.seen = which, 0


@pytest.mark.parametrize("case", SCARCE, ids=lambda c: c.name)
def test_memory_ends_at_every_allocation(case: Scarce, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    kind = warpnorm.nn.BatchNormReLU2d if case.is_fused else warpnorm.nn.BatchNorm2d
    ours, theirs = kind(16), torch.nn.BatchNorm2d(16)
    x = torch.randn(4, 16, 40, 40)
    x = x.contiguous(memory_format=torch.channels_last) if case.is_last else x
    grad = torch.randn_like(x)
    expected = torch.relu(theirs(x)) if case.is_fused else theirs(x)
    with settings.override(route="native", keep_bytes=0):
        x.requires_grad_()
        ours.eval()(x).backward(grad)  # code is built before memory ends
        warm = kind(16)
        warm(x).backward(grad)
        x.grad = None
        ours.train().zero_grad()
        allocations = Allocations(monkeypatch)
        before = {name: value.clone() for name, value in (*ours.state_dict().items(), ("input", x.detach()))}
        versions = [value._version for value in (*ours.buffers(), x)]
        files = sorted(path.name for path in home.iterdir())
        for which in count():
            allocations.fail(which)
            try:
                output = ours(x)
            except torch.OutOfMemoryError:
                for name, value in (*ours.state_dict().items(), ("input", x.detach())):
                    assert torch.equal(value, before[name]), name
                assert versions == [value._version for value in (*ours.buffers(), x)]
            else:
                break
        assert which >= 2, "outputs and statistics at the least"
        torch.testing.assert_close(output, expected)
        torch.testing.assert_close(ours.running_var, theirs.running_var)
        for which in count():
            allocations.fail(which)
            try:
                output.backward(grad, retain_graph=True)
            except torch.OutOfMemoryError:
                assert x.grad is None
                assert all(parameter.grad is None for parameter in ours.parameters())
            else:
                break
        assert which >= 1
    assert sorted(path.name for path in home.iterdir()) == files
    allocations.fail(-1)
    leaf = x.detach().clone().requires_grad_()
    (torch.relu(theirs(leaf)) if case.is_fused else theirs(leaf)).backward(grad)
    torch.testing.assert_close(x.grad, leaf.grad, rtol=1e-4, atol=1e-5)


def test_memory_ends_in_one_of_two_threads(home: Path, monkeypatch: pytest.MonkeyPatch, fresh: None) -> None:
    """While the other averages its channels: running statistics are what they were."""
    load = build.load
    change = '#include "pointwise.h"\n#define malloc(size) (part == 1 ? 0 : malloc(size))\n'
    monkeypatch.setattr(build, "load", lambda text: load(text.replace('#include "pointwise.h"', change)))
    mean, variance = torch.randn(16), torch.rand(16) + 1
    before = mean.clone(), variance.clone()
    scale = number()

    @warpnorm.fuse
    def function(x: torch.Tensor) -> torch.Tensor:
        return F.batch_norm(torch.sigmoid(x) * scale, mean, variance, training=True)

    torch.set_num_threads(2)
    try:
        with settings.override(route="native"), pytest.raises(torch.OutOfMemoryError, match="native code has to keep"):
            function(torch.randn(4, 16, 80, 80))
    finally:
        torch.set_num_threads(1)
    assert torch.equal(mean, before[0])
    assert torch.equal(variance, before[1])


# Other versions


def test_an_older_pytorch_is_refused_in_a_sentence() -> None:
    for old in ("2.9.1", "2.9.0+cu128", "1.13.0"):
        with pytest.raises(ImportError, match=rf"needs PyTorch 2\.10 or later, but {old.split('+')[0]}"):
            version.require_torch(old)
    for fine in ("2.10.0", "2.13.0+cpu", "3.0.0a0+git1234", "unknown"):
        version.require_torch(fine)


@pytest.fixture
def triton_of(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[[str], None]]:
    """As if this version of it were installed."""

    def install(number: str) -> None:
        (tmp_path / "__init__.py").write_text(f'"""isort:skip_file"""\n__version__ = {number!r}\n')
        spec = type("Spec", (), {"origin": str(tmp_path / "__init__.py") if number else None})
        monkeypatch.setattr(pipeline, "find_spec", lambda _: spec)
        monkeypatch.setattr(pipeline.sys, "platform", "linux")
        pipeline.why_no_triton.cache_clear()

    yield install
    pipeline.why_no_triton.cache_clear()


def test_an_older_triton_is_refused_in_a_sentence(triton_of: Callable[[str], None]) -> None:
    triton_of("3.5.1")
    why = r"need Triton 3\.6 or later, but 3\.5\.1 is installed"
    with settings.override(route="kernels"), pytest.raises(warpnorm.UnavailableError, match=why):
        warpnorm.rms_norm(torch.randn(2, 8), (8,))
    triton_of("")
    assert pipeline.why_no_triton() == "Triton is not installed", "an empty folder of this name is not it"
    for fine in ("3.6.0", "3.10.0+git1234", "4.0.0"):
        triton_of(fine)
        assert pipeline.has_triton(), fine


def test_a_newer_triton_that_compiles_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = pytest.importorskip("warpnorm.codegen.kernel")

    def compile(*_: Any, **__: Any) -> None:
        raise TypeError("compile() got an unexpected keyword argument 'target'")

    def launch() -> None:
        kernel._compile((run.text_of, {}, {}, {}), ("cuda", 90, 32), {})

    monkeypatch.setattr(kernel, "ASTSource", lambda *_: None)
    monkeypatch.setattr(kernel.triton, "compile", compile)
    monkeypatch.setattr(kernel.triton, "__version__", "4.1.0")
    with pytest.raises(warpnorm.UnavailableError, match=r"Triton 4.1.0 does not compile text_of.*install 3\.6, or set"):
        launch()
    monkeypatch.setattr(kernel.triton, "__version__", "3.6.0")
    with pytest.raises(TypeError, match="unexpected keyword"):
        launch()


def test_a_newer_triton_without_what_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    import builtins

    import warpnorm.codegen as package

    original = builtins.__import__

    def missing(name: str, globals: Any = None, locals: Any = None, fromlist: Any = (), level: int = 0) -> Any:
        if name == "warpnorm.codegen" and "bind" in (fromlist or ()):
            raise ImportError("cannot import name 'GPUTarget'")
        return original(name, globals, locals, fromlist, level)

    assert package
    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(warpnorm.UnavailableError, match=r"not one that the kernels are written for.*'GPUTarget'"):
        pipeline.binder()
