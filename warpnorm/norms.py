"""The norms as data. A norm has no weight and no bias: those are an epilogue."""

from dataclasses import dataclass

# Which dimensions of the input tell its rows apart
LEADING = "leading"  # all but the last ones, over which the call normalizes
CHANNEL = "channel"  # the second: a row is a channel, of all samples
GROUPS = "groups"  # the first and the second, in groups of neighbours: a row is a group of channels of one sample


@dataclass(frozen=True)
class Norm:
    """`is_centered`: the statistic is mean and variance; otherwise it is the mean square alone. `rows`: which dimensions
    tell rows apart. Where nothing `is_computed`, there is no statistic, and xhat is c: an epilogue normalizes by what it is
    given. `keeps_variance`: it is returned beside the statistic, for running averages."""

    name: str
    is_centered: bool
    rows: str = LEADING
    is_computed: bool = True
    keeps_variance: bool = False

    @property
    def statistics(self) -> tuple[str, ...]:
        """What forward finds of each row."""
        return self.saved + (("variance",) * self.keeps_variance)

    @property
    def saved(self) -> tuple[str, ...]:
        """What is kept of each row for backward, and what `return_stats=True` returns: the first of the statistics."""
        return (("mean",) * self.is_centered) + ("rstd",) if self.is_computed else ()

    @property
    def is_by_channel(self) -> bool:
        """Whether a row may lie in pieces, and its parameters along rows."""
        return self.rows != LEADING


LAYER_NORM = Norm("layer_norm", is_centered=True)
RMS_NORM = Norm("rms_norm", is_centered=False)
GROUP_NORM = Norm("group_norm", is_centered=True, rows=GROUPS)
TRACKED_NORM = Norm("tracked_norm", is_centered=True, rows=GROUPS, keeps_variance=True)  # InstanceNorm that averages
BATCH_NORM = Norm("batch_norm", is_centered=True, rows=CHANNEL, keeps_variance=True)
FIXED_NORM = Norm("fixed_norm", is_centered=False, rows=CHANNEL, is_computed=False)  # BatchNorm in evaluation
ALL = (LAYER_NORM, RMS_NORM, GROUP_NORM, TRACKED_NORM, BATCH_NORM, FIXED_NORM)
