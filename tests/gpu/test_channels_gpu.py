"""The contracts of the norms by channel."""

from kernel_contracts.channel_behaviour_contract import *  # noqa: F403
from kernel_contracts.channel_contract import *  # noqa: F403
from kernel_contracts.channel_fuse_contract import *  # noqa: F403
from kernel_contracts.channel_plan_contract import *  # noqa: F403
from kernel_contracts.channel_training_contract import *  # noqa: F403
from kernel_contracts.values_contract import *  # noqa: F403
