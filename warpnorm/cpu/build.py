"""C becomes a library. It is named by its text, the compiler, the flags and the processor, so that a cache on a shared disk
hands nobody code for another processor; written in one step, for the user alone."""

import _ctypes
import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
import weakref
from functools import cache
from pathlib import Path
from typing import Any

from warpnorm import folder, settings
from warpnorm.locks import Lock

COMPILERS = ("cc", "gcc", "clang")
# Neither errno nor traps, which keep loops from being vectorized; NaN and infinities stay what they are
FLAGS = ("-O3", "-std=gnu11", "-fopenmp-simd", "-fno-math-errno", "-fno-trapping-math", "-fPIC", "-shared", "-w")
# Functions of the C library for whole vectors, where it has all of them
VECTOR_MATH, VECTOR_LIBRARY, VECTOR_SINCE = "-DVECTOR_MATH", "-lmvec", (2, 35)
HERE = Path(__file__).parent
ROOM = 1 << 20  # bytes, more than a library has

# Those that somebody still has: a function whose constants change with every call would otherwise fill the memory
_libraries: weakref.WeakValueDictionary[str, ctypes.CDLL] = weakref.WeakValueDictionary()
_lock = Lock()


class CompilerError(RuntimeError):
    """The compiler that was found does not do."""


@cache
def compiler() -> str | None:
    """The path of the system's compiler, if it has one."""
    named = settings.current().compiler
    if named is not None:
        return shutil.which(named) if named else None
    return next((path for path in map(shutil.which, COMPILERS) if path), None)


@cache
def is_there() -> bool:
    """Whether a compiler was found that builds the pool of threads: then it builds the rest."""
    if compiler() is None or os.name != "posix":
        return False
    try:
        pool()
    except (CompilerError, OSError):
        return False
    return True


@cache
def why_not() -> str:
    """Why there is no native code here."""
    named = settings.current().compiler
    if compiler() is None and named is not None:
        return f"WARPNORM_CC is {named!r}, which is not there" if named else "WARPNORM_CC is empty, which means none"
    if compiler() is None:
        return f"no C compiler was found (looked for {', '.join(COMPILERS)})"
    try:
        pool()
    except (CompilerError, OSError) as error:
        return f"{compiler()} does not build it: {error}"
    return ""


def version() -> str:
    """What the compiler says of itself, in a line."""
    return (_version().splitlines() or ["?"])[0]


@cache
def pool() -> Any:
    """`run(function, pointers, numbers, reals, parts)` of pool.c."""
    return load((HERE / "pool.c").read_text())


def load(source: str) -> ctypes.CDLL:
    """The library stays as long as it, or one of its functions, is referred to."""
    with _lock:
        library = _libraries.get(source)
        if library is None:
            library = _libraries[source] = _load(source)
            weakref.finalize(library, _ctypes.dlclose, library._handle).atexit = False
        return library


class Address(int):
    """Of a function, whose library stays as long as this does, or of numbers."""

    owner: Any

    @staticmethod
    def of(source: str, name: str) -> "Address":
        return Address.to(getattr(load(source), name))

    @staticmethod
    def to(owner: Any) -> "Address":
        value = ctypes.cast(owner, ctypes.c_void_p).value
        assert value is not None
        address = Address(value)
        address.owner = owner
        return address


def _load(source: str) -> ctypes.CDLL:
    text = source.replace('#include "pointwise.h"', (HERE / "pointwise.h").read_text())
    key = hashlib.sha256("\0".join([text, *_command(), _version(), _processor()]).encode()).hexdigest()[:32]
    name = f"native_{key}.so"
    try:
        found = folder.current() / name
        if folder.is_sealed(found):
            return ctypes.CDLL(str(found))
    except OSError:  # of another system, or nothing is run from there
        pass
    try:
        return ctypes.CDLL(str(_build(text, folder.made() / name)))
    except OSError:  # a read-only or full home, one that is deleted meanwhile, or one that nothing is run from
        return ctypes.CDLL(str(_build(text, folder.private() / name)))


def _build(text: str, path: Path) -> Path:
    with tempfile.TemporaryDirectory(dir=path.parent, prefix="build-", ignore_cleanup_errors=True) as scratch:
        source, built = Path(scratch) / "code.c", Path(scratch) / "code.so"
        source.write_text(text)
        command = [*_command(), str(source), "-o", str(built), "-lm", "-lpthread"]
        command += [VECTOR_LIBRARY] * (VECTOR_MATH in command)
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0 and VECTOR_MATH in command:  # perhaps for want of that
            command = [word for word in command if word not in (VECTOR_MATH, VECTOR_LIBRARY)]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            (Path(scratch) / "room").write_bytes(bytes(ROOM))  # an error of its own where the disk is full
            said = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines()
            raise CompilerError(said[0] if said else f"exit status {done.returncode}")
        folder.seal(built)
        os.replace(built, path)
    return path


@cache
def vector_bytes() -> int:
    """Of the processor's registers."""
    features = _processor()
    return 64 if "avx512f" in features else 32 if "avx2" in features else 16


def _command() -> tuple[str, ...]:
    path = compiler()
    assert path is not None
    is_x86 = platform.machine().lower() in ("x86_64", "amd64", "i686")
    wide = ("-mprefer-vector-width=512",) if is_x86 and "avx512f" in _processor() else ()
    vector = (VECTOR_MATH,) if is_x86 and _library_version() >= VECTOR_SINCE else ()
    return (path, *FLAGS, "-march=native" if is_x86 else "-mcpu=native", *wide, *vector)


@cache
def _library_version() -> tuple[int, ...]:
    """Of GNU's C library, if it is that."""
    name, version = platform.libc_ver()
    return tuple(map(int, version.split(".")[:2])) if name == "glibc" and version[:1].isdigit() else ()


@cache
def _version() -> str:
    path = compiler()
    assert path is not None
    return subprocess.run([path, "--version"], capture_output=True, text=True, check=False).stdout


@cache
def _processor() -> str:
    """What the code may use: the features of the processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    wanted = ("flags", "Features", "model name", "CPU part")
    return "\n".join(sorted({line for line in lines if line.split("\t")[0].strip() in wanted}))
