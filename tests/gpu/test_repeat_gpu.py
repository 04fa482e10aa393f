"""A call that was seen before, on a GPU."""

from kernel_contracts.repeat_contract import *  # noqa: F403
