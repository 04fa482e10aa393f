"""A call that was seen before, by native code."""

from kernel_contracts.repeat_contract import *  # noqa: F403
