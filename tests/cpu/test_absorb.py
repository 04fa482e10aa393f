"""The residual add in a graph of Inductor's, on a CPU."""

import pytest

from kernel_contracts.absorb_contract import *  # noqa: F403
from warpnorm import routing

pytestmark = pytest.mark.skipif(not routing.has_compiler(), reason="native code needs a compiler")


@pytest.fixture
def device() -> str:
    return "cpu"
