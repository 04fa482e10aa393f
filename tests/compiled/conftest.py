"""Every case is compiled, for GPUs that are not here: a run has a sixteenth, of each test one; all with
WARPNORM_TEST_ALL=1."""

import pytest

from selection import select


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    select(
        config,
        items,
        "compiled",
        ("test_compiled.py", "test_compiled_channel.py", "test_compiled_widths.py"),
        one_in=16,
        keeps_lone=True,
        every_but=(),
    )
