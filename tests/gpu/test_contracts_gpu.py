"""The contracts of the kernels, on a real GPU."""

from kernel_contracts.accuracy_contract import *  # noqa: F403
from kernel_contracts.behaviour_contract import *  # noqa: F403
from kernel_contracts.opinfo_contract import *  # noqa: F403
from kernel_contracts.plan_contract import *  # noqa: F403
