"""The contracts of the kernels, under the interpreter."""

from kernel_contracts.accuracy_contract import *  # noqa: F403
from kernel_contracts.behaviour_contract import *  # noqa: F403
from kernel_contracts.opinfo_contract import *  # noqa: F403
from kernel_contracts.plan_contract import *  # noqa: F403
