"""Generated source becomes a module. Triton reads the source of a function from its file, so there is one, named by the
hash of its text; a damaged or foreign file is rewritten, never run."""

import hashlib
import os
import tempfile
import threading
from pathlib import Path
from types import ModuleType

from warpnorm import settings

_modules: dict[str, ModuleType] = {}
_lock = threading.Lock()


def load(source: str) -> ModuleType:
    with _lock:
        module = _modules.get(source)
        if module is None:
            module = _modules[source] = _import(source, _write(source))
        return module


def _write(source: str) -> Path:
    name = f"pointwise_{hashlib.sha256(source.encode()).hexdigest()[:24]}.py"
    try:
        return _write_in(settings.current().cache_dir, name, source)
    except OSError:  # a read-only or full home: Triton needs the file only until the module is imported
        return _write_in(Path(tempfile.mkdtemp(prefix="warpnorm-")), name, source)


def _write_in(folder: Path, name: str, source: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    path = folder / name
    try:
        if path.read_text() == source:
            return path
    except (OSError, UnicodeDecodeError):
        pass
    handle, temporary = tempfile.mkstemp(dir=folder, suffix=".tmp")  # readable by the user alone
    try:
        with os.fdopen(handle, "w") as file:
            file.write(source)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
    return path


def _import(source: str, path: Path) -> ModuleType:
    """Runs the text itself, so that neither the file nor a bytecode file beside it can put in anything else."""
    module = ModuleType(f"warpnorm_generated.{path.stem}")
    module.__file__ = str(path)
    exec(compile(source, str(path), "exec"), module.__dict__)
    return module
