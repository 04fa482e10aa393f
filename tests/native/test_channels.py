"""The contracts of the norms by channel, by native code."""

from kernel_contracts.channel_behaviour_contract import *  # noqa: F403
from kernel_contracts.channel_contract import *  # noqa: F403
from kernel_contracts.channel_fuse_contract import *  # noqa: F403
from kernel_contracts.channel_training_contract import *  # noqa: F403
