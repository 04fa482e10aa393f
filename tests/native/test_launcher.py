"""The compiled launcher, of native code."""

from kernel_contracts.launcher_contract import *  # noqa: F403
