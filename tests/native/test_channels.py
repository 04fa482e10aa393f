"""The contracts of the norms by channel, by native code."""

from kernel_contracts.channel_behaviour_contract import *  # noqa: F403
from kernel_contracts.channel_contract import *  # noqa: F403
from kernel_contracts.channel_fuse_contract import *  # noqa: F403
from kernel_contracts.channel_training_contract import *  # noqa: F403
from kernel_contracts.values_contract import *  # noqa: F403

# of plans and launches, which native code has not: test_native.py has what it promises instead
del test_no_recompile_when_only_the_batch_changes  # noqa: F821
del test_nothing_is_written_outside_the_output_by_channel  # noqa: F821
del test_only_the_gradients_that_are_needed_by_channel  # noqa: F821
del test_the_memory_format_stays  # noqa: F821
# eager PyTorch's sums are float64 on a CPU: shuffled batches give the same bits, and nothing else may be off by a last place
del test_training_goes_pytorchs_way  # noqa: F821
