"""Ctrl-C, which reaches every process of a run: those that were started leave it to who started them."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import resource_tracker


def leave_to_parent() -> None:
    """In a process that was started, once it runs."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


@contextmanager
def deaf() -> Iterator[None]:
    """A process that is started here does not hear Ctrl-C, and neither do those that it starts; here it is heard after."""
    if os.name != "posix":
        yield
        return
    resource_tracker.ensure_running()  # which would let Ctrl-C through when it is first started
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
