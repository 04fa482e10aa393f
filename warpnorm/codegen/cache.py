"""Generated source becomes a module, with a file named by the hash of its text for whoever looks at it: debuggers,
tracebacks. Neither Python nor Triton reads the file: what runs is the text."""

import hashlib
import linecache
from pathlib import Path
from types import ModuleType

from warpnorm import folder
from warpnorm.locks import Lock

LARGEST_CACHE = 4096  # then the oldest goes; kernels have their functions, and what is asked for again is loaded again
_modules: dict[str, ModuleType] = {}
_lock = Lock()


def load(source: str) -> ModuleType:
    with _lock:
        module = _modules.get(source)
        if module is None:
            while len(_modules) >= LARGEST_CACHE:
                oldest = _modules.pop(next(iter(_modules)))
                linecache.cache.pop(str(oldest.__file__), None)
            module = _modules[source] = _import(source, _write(source))
        return module


def _write(source: str) -> Path:
    name = f"pointwise_{hashlib.sha256(source.encode()).hexdigest()[:24]}.py"
    for find in (folder.made, folder.private):  # the second for a read-only or full home
        try:
            return _write_in(find(), name, source)
        except OSError:
            continue
    return Path(name)  # nothing can be written anywhere, and nobody has to


def _write_in(home: Path, name: str, source: str) -> Path:
    path = home / name
    try:
        if folder.read(path)[0].decode() == source:
            return path
    except (OSError, UnicodeDecodeError):
        pass
    folder.write(path, source)
    return path


def _import(source: str, path: Path) -> ModuleType:
    """Runs the text itself, so that neither the file nor a bytecode file beside it can put in anything else; Triton, which
    asks for the lines of the file, is given those of the text."""
    linecache.cache[str(path)] = (len(source), None, source.splitlines(keepends=True), str(path))
    module = ModuleType(f"warpnorm_generated.{path.stem}")
    module.__file__ = str(path)
    exec(compile(source, str(path), "exec"), module.__dict__)
    return module
