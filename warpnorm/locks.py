"""What a fork leaves behind: a lock that its child finds free, as whoever had it was a thread of the parent and would never
let it go; and that it is a child."""

import os
import threading
from typing import Any
from weakref import WeakSet

_all: "WeakSet[Lock]" = WeakSet()


class Lock:
    """One that its thread may take again. To be held in a `with` statement."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        _all.add(self)

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: Any) -> None:
        self._lock.release()

    def free(self) -> None:
        self._lock = threading.RLock()


def is_child() -> bool:
    """Whether this process was forked after the package was imported: it has none of its parent's threads."""
    return _is_child


_is_child = False


def _after_fork() -> None:
    global _is_child
    _is_child = True
    for lock in list(_all):
        lock.free()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
