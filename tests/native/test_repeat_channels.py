"""Norms by channel that were seen before."""

from kernel_contracts.repeat_channels_contract import *  # noqa: F403
