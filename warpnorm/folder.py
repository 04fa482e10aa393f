"""The cache folder, which code is run from: made for the user alone, and refused where somebody else could have written in
it. A temporary folder of this process takes its place then, and where it cannot be written. Files appear whole or not at
all; libraries end with a digest of themselves, for to load one that was cut off would end the process."""

import atexit
import hashlib
import os
import shutil
import stat
import tempfile
import warnings
from contextlib import suppress
from pathlib import Path

from warpnorm import settings
from warpnorm.locks import Lock

SEAL = b"warpnorm"  # ahead of the digest
OTHERS = stat.S_IWGRP | stat.S_IWOTH
ADMINISTRATOR = 0  # who may write everywhere
WARNING = "{}. A temporary folder is used instead, so that every process builds its code anew"

_told: set[Path] = set()
_private: tuple[int, Path] | None = None  # of which process
_lock = Lock()


def current() -> Path:
    """The folder that is read from, which need not be there yet: that of the settings, or where that is refused the private
    one, of which a warning tells once."""
    folder = settings.current().cache_dir
    why = refusal(folder)
    if not why:
        return folder
    _tell(folder, why)
    return private()


def made() -> Path:
    """The same folder, to write into."""
    folder = current()
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        _tell(
            folder, f"the cache folder {folder} cannot be made ({error.strerror}): name another in WARPNORM_CACHE_DIR"
        )
        raise
    return current()  # somebody else may have made it meanwhile


def private() -> Path:
    """A temporary folder of this process, which is gone when it ends."""
    global _private
    with _lock:
        if _private is None or _private[0] != os.getpid() or not _private[1].is_dir():
            _private = os.getpid(), Path(tempfile.mkdtemp(prefix="warpnorm-"))  # readable by the user alone
            atexit.register(_remove, *_private)
        return _private[1]


def refusal(folder: Path) -> str:
    """Why no code is run from a folder, in a sentence; nothing where it is, or is not there yet."""
    try:
        found = os.stat(folder)
    except OSError:
        return ""
    advice = "and code is run from it: name another in WARPNORM_CACHE_DIR"
    if is_foreign(found):
        return f"the cache folder {folder} belongs to another user (number {found.st_uid}), {advice}"
    if os.name == "posix" and found.st_mode & OTHERS:
        return f"the cache folder {folder} can be written by other users, {advice}, or take that from them (chmod go-w)"
    return ""


def is_foreign(found: os.stat_result) -> bool:
    """Whether a file or folder is neither this user's nor the administrator's."""
    return os.name == "posix" and found.st_uid not in (os.geteuid(), ADMINISTRATOR)


def write(path: Path, text: str) -> None:
    """In one step, for the user alone."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, suffix=".tmp")  # readable by the user alone
    try:
        with os.fdopen(handle, "w") as file:
            file.write(text)
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):  # it is gone with its folder
            os.unlink(temporary)
        raise


def read(path: Path) -> tuple[bytes, os.stat_result]:
    """What a file holds, and what is known of it; an OSError where it is none: a pipe would be waited for."""
    handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    with os.fdopen(handle, "rb") as file:
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode):
            raise OSError(f"{path} is not a file")
        return file.read(), found


def seal(library: Path) -> None:
    """Ends a library with the digest of what it is, which those that load it do not read."""
    with library.open("r+b") as file:
        digest = hashlib.sha256(file.read()).digest()
        file.write(SEAL + digest)


def is_sealed(library: Path) -> bool:
    """Whether a library is whole, and its file one that nobody else can have written."""
    try:
        content, found = read(library)
    except OSError:
        return False
    size = len(SEAL) + hashlib.sha256().digest_size
    body, end = content[:-size], content[-size:]
    is_whole = end == SEAL + hashlib.sha256(body).digest()
    return is_whole and not is_foreign(found) and not (os.name == "posix" and found.st_mode & OTHERS)


def _tell(folder: Path, why: str) -> None:
    """Once."""
    if folder not in _told:
        _told.add(folder)
        warnings.warn(WARNING.format(why), RuntimeWarning, stacklevel=3)


def _remove(owner: int, folder: Path) -> None:
    if os.getpid() == owner:  # a child that ends leaves it to its parent
        shutil.rmtree(folder, ignore_errors=True)
