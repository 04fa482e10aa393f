"""The contracts of the kernels, by native code."""

from kernel_contracts.accuracy_contract import *  # noqa: F403
from kernel_contracts.behaviour_contract import *  # noqa: F403
from kernel_contracts.fuse_at_hand_contract import *  # noqa: F403
from kernel_contracts.fuse_behaviour_contract import *  # noqa: F403
from kernel_contracts.fuse_contract import *  # noqa: F403
from kernel_contracts.fuse_dropout_contract import *  # noqa: F403
from kernel_contracts.fuse_dtypes_contract import *  # noqa: F403
from kernel_contracts.fuse_operators_contract import *  # noqa: F403
from kernel_contracts.fuse_random_contract import *  # noqa: F403
from kernel_contracts.opinfo_contract import *  # noqa: F403
from kernel_contracts.packed_contract import *  # noqa: F403

# of plans and launches, which native code has not: test_native.py has what it promises instead
del test_fused_for_other_row_counts_is_neither_captured_nor_compiled  # noqa: F821
del test_fused_in_several_threads_is_captured_and_compiled_once  # noqa: F821
del test_no_recompile_when_only_the_row_count_changes  # noqa: F821
del test_only_the_gradients_that_are_needed  # noqa: F821
del test_several_threads_trace_and_compile_once  # noqa: F821
