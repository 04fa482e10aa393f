"""The compiled launcher, of native code."""

from kernel_contracts.launcher_contract import *  # noqa: F403
from kernel_contracts.launcher_fuse_contract import *  # noqa: F403
