"""A call that was seen before, by interpreted kernels."""

from kernel_contracts.repeat_contract import *  # noqa: F403
