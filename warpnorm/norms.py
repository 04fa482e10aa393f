"""The norms as data. A norm has no weight and no bias: those are an epilogue."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Norm:
    """`is_centered`: the statistic is mean and variance; otherwise it is the mean square alone."""

    name: str
    is_centered: bool

    @property
    def statistics(self) -> tuple[str, ...]:
        """What is kept of each row for backward, and what `return_stats=True` returns."""
        return ("mean", "rstd") if self.is_centered else ("rstd",)


LAYER_NORM = Norm("layer_norm", is_centered=True)
RMS_NORM = Norm("rms_norm", is_centered=False)
ALL = (LAYER_NORM, RMS_NORM)
