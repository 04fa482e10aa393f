"""Which cases of the contracts a run has: where they take long, one in several, by their names; all with
WARPNORM_TEST_ALL=1."""

import os
import zlib
from collections.abc import Sequence

import pytest


def select(config: pytest.Config, items: list[pytest.Item], folder: str, files: Sequence[str], one_in: int) -> None:
    if os.environ.get("WARPNORM_TEST_ALL") == "1":
        return
    ours = [item for item in items if item.path.parent.name == folder and item.path.name in files]
    left_out = {item for item in ours if zlib.crc32(item.nodeid.encode()) % one_in}
    config.hook.pytest_deselected(items=list(left_out))
    items[:] = [item for item in items if item not in left_out]
