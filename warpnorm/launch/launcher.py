"""The compiled launcher: `launcher.cpp` built once for a version of PyTorch and Python, and kept on disk. Building takes
half a minute, so that it happens in the background, and only where calls repeat; until then, and where there is no compiler,
`repeat.py` does the same in Python."""

import atexit
import hashlib
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from importlib.machinery import ExtensionFileLoader
from importlib.util import find_spec, module_from_spec, spec_from_loader
from pathlib import Path
from typing import Any

import torch

from warpnorm import folder, settings
from warpnorm.errors import UnavailableError

NAME = "warpnorm_launcher"
SOURCE = Path(__file__).with_name("launcher.cpp")
COMPILERS = ("c++", "g++", "clang++")
FLAGS = ("-O2", "-fPIC", "-fvisibility=hidden", "-pipe", "-w")
STANDARDS = ("-std=c++20", "-std=c++17")  # the headers of PyTorch ask for the first, and take the second
LIBRARIES = ("-ltorch_python", "-ltorch_cpu", "-lc10")
# Repeated calls after which it is built: half a minute of a processor, for some 10 microseconds of each
MANY_CALLS = 1000

module: Any = None  # once it is there
why_not = ""  # there is none, if that is certain
_thread: threading.Thread | None = None
_process: subprocess.Popen[bytes] | None = None
_lock = threading.Lock()
_asked: tuple[settings.Settings | None, bool] = None, False  # of which settings, and whether it can be built


def find(set_up: Callable[[Any], None], calls: int) -> Any:
    """The launcher, if it is there by now; `calls` have been repeated so far. `set_up` is called with it once."""
    wanted = settings.current().launcher
    if wanted == "python":
        return None
    if wanted == "compiled" and prepare(set_up):
        raise UnavailableError(f"there is no compiled launcher: {why_not}; or set WARPNORM_LAUNCHER=auto")
    if module is None and not why_not and _thread is None and (calls == 1 or calls >= MANY_CALLS):
        with _lock:
            if module is None and not _load_kept(set_up) and calls >= MANY_CALLS:
                _start(set_up)
    return module


def prepare(set_up: Callable[[Any], None]) -> str:
    """Builds the launcher where it is not there yet, and waits for it; says why there is none, if so."""
    if module is None and not why_not:
        with _lock:
            if module is None and not _load_kept(set_up) and _thread is None:
                _start(set_up)
        if _thread is not None:
            _thread.join()
    return why_not


def _load_kept(set_up: Callable[[Any], None]) -> bool:
    try:
        return _load(library(), set_up)
    except OSError:  # there is no folder that could hold it
        return False


def _load(path: Path, set_up: Callable[[Any], None]) -> bool:
    """From the disk, where it lies there, whole."""
    global module
    if not folder.is_sealed(path):
        return False
    try:
        spec = spec_from_loader(NAME, ExtensionFileLoader(NAME, str(path)))
        assert spec is not None
        assert spec.loader is not None
        found = module_from_spec(spec)
        spec.loader.exec_module(found)
    except ImportError:  # damaged, or of other libraries
        return False
    set_up(found)
    module = found
    return True


def library() -> Path:
    """Where it lies, named by whatever it depends on."""
    return folder.current() / f"launcher_{_name()}.so"


@cache
def _name() -> str:
    import sysconfig  # which reads the environment

    version = torch.version
    has_header = any((Path(folder) / "cuda.h").exists() for folder in _folders())
    of = [SOURCE.read_text(), version.__version__, version.git_version, sysconfig.get_config_var("SOABI")]
    of += [has_header, platform.machine(), torch.__file__, *FLAGS, *STANDARDS, *LIBRARIES]
    return hashlib.sha256("\0".join(map(str, of)).encode()).hexdigest()[:32]


def _start(set_up: Callable[[Any], None]) -> None:
    global _thread, why_not
    found = compiler()
    if sys.platform != "linux" or found is None:
        why_not = no_compiler()
        return
    try:
        path, command = library(), _command(found)  # of the settings as they are now
    except OSError as error:
        why_not = f"no folder can hold it: {error}"
        return

    def work() -> None:
        global why_not
        try:
            try:
                path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
                _make(path, command, set_up)
            except OSError:  # a read-only or full home, or one that is deleted meanwhile
                _make(folder.private() / "launcher.so", command, set_up)
            _mark(path, None)
        except Exception as error:  # nobody would see it
            why_not = f"{found} does not build it: {error}"
            _mark(path, found)

    _thread = threading.Thread(target=work, name="warpnorm launcher", daemon=True)
    _thread.start()


def _make(path: Path, command: Sequence[str], set_up: Callable[[Any], None]) -> None:
    with _alone(path.with_suffix(".lock")):
        if _load(path, set_up):  # whoever had the lock before has built it
            return
        _build(path, command)
        if not _load(path, set_up):
            raise subprocess.SubprocessError("what it built cannot be loaded")


def can_be_built() -> bool:
    """Whether the settings want it, there is what it takes, and no process has failed: once for each settings, as every
    short row asks."""
    global _asked
    now = settings.current()
    if _asked[0] is not now:
        found = compiler() if sys.platform == "linux" and now.launcher != "python" else None
        _asked = now, found is not None and all(map(Path.exists, _headers())) and not _has_failed(found)
    return _asked[1]


def _mark(path: Path, compiler: str | None) -> None:
    """Beside the library: which compiler did not build it."""
    with suppress(OSError):
        mark = path.with_suffix(".failed")
        if compiler is None:
            mark.unlink(missing_ok=True)
        else:
            mark.write_text(_identity(compiler))


def _has_failed(compiler: str) -> bool:
    try:
        return library().with_suffix(".failed").read_text() == _identity(compiler)
    except (OSError, UnicodeDecodeError):
        return False


def _identity(compiler: str) -> str:
    return f"{os.path.realpath(compiler)} {os.stat(compiler).st_mtime_ns}"


def _headers() -> tuple[Path, ...]:
    """Those that may not be there: Python's are often a package of their own."""
    import sysconfig

    return Path(sysconfig.get_path("include")) / "Python.h", Path(torch.__file__).parent / "include" / "ATen"


def compiler() -> str | None:
    """The path of the system's C++ compiler, if it has one."""
    named = settings.current().cxx_compiler
    if named is not None:
        return shutil.which(named) if named else None
    return next((path for path in map(shutil.which, COMPILERS) if path), None)


def no_compiler() -> str:
    named = settings.current().cxx_compiler
    if named is not None:
        return f"WARPNORM_CXX is {named!r}, which is not there" if named else "WARPNORM_CXX is empty, which means none"
    return f"no C++ compiler was found (looked for {', '.join(COMPILERS)})"


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    """One process of a machine builds, the others wait."""
    import fcntl  # not everywhere

    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError:  # a file system without locks: some build it twice
            yield
            return
        try:
            yield
        finally:
            fcntl.flock(file, fcntl.LOCK_UN)


def _build(path: Path, command: Sequence[str]) -> None:
    scratch = tempfile.mkdtemp(dir=path.parent, prefix="build-")  # which a child that ends must not remove
    atexit.register(_stop, scratch, os.getpid())
    try:
        part, built = (os.path.join(scratch, name) for name in ("launcher.o", "launcher.so"))
        said = ""
        for standard in STANDARDS:
            status, said = _run([*command, standard, "-c", str(SOURCE), "-o", part])
            if status == 0:
                status, said = _run([command[0], "-shared", part, "-o", built, *_libraries()])
            if status == 0:
                folder.seal(Path(built))
                os.replace(built, path)
                return
            if status < 0:  # it was killed
                break
        lines = [line for line in said.splitlines() if "error" in line] or said.splitlines()
        raise subprocess.SubprocessError(lines[0] if lines else "it says nothing")
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _run(command: Sequence[str]) -> tuple[int, str]:
    global _process
    _process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True)
    said = _process.communicate()[1]
    return _process.returncode, said.decode(errors="replace")


def _stop(scratch: str, owner: int) -> None:
    """Nothing outlives the program."""
    if os.getpid() != owner:  # but that of a child does not end the parent's
        return
    if _process is not None and _process.poll() is None:
        os.killpg(_process.pid, signal.SIGKILL)
    shutil.rmtree(scratch, ignore_errors=True)


def _after_fork() -> None:
    """Threads stay with the parent."""
    global _lock, _thread, _process
    _lock, _thread, _process = threading.Lock(), None, None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def _command(compiler: str) -> list[str]:
    is_new = int(torch._C._GLIBCXX_USE_CXX11_ABI)
    return [compiler, *FLAGS, f"-D_GLIBCXX_USE_CXX11_ABI={is_new}", *(f"-I{folder}" for folder in _folders())]


def _folders() -> list[str]:
    """Where headers lie: PyTorch's, Python's, and that of CUDA's driver, which comes with Triton."""
    import sysconfig

    include = Path(torch.__file__).parent / "include"
    folders = [include, include / "torch" / "csrc" / "api" / "include", sysconfig.get_path("include")]
    triton = find_spec("triton")
    if triton is not None and triton.origin is not None:
        folders.append(Path(triton.origin).parent / "backends" / "nvidia" / "include")
    return list(map(str, folders))


def _libraries() -> list[str]:
    return [f"-L{Path(torch.__file__).parent / 'lib'}", *LIBRARIES]
