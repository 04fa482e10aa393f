"""The contracts of the kernels, on a real GPU."""

from kernel_contracts.accuracy_contract import *  # noqa: F403
from kernel_contracts.behaviour_contract import *  # noqa: F403
from kernel_contracts.blocks_contract import *  # noqa: F403
from kernel_contracts.fuse_at_hand_contract import *  # noqa: F403
from kernel_contracts.fuse_behaviour_contract import *  # noqa: F403
from kernel_contracts.fuse_contract import *  # noqa: F403
from kernel_contracts.fuse_dropout_contract import *  # noqa: F403
from kernel_contracts.fuse_dtypes_contract import *  # noqa: F403
from kernel_contracts.fuse_operators_contract import *  # noqa: F403
from kernel_contracts.fuse_random_contract import *  # noqa: F403
from kernel_contracts.opinfo_contract import *  # noqa: F403
from kernel_contracts.packed_contract import *  # noqa: F403
from kernel_contracts.plan_contract import *  # noqa: F403
