"""What warpnorm raises: one base class and few subclasses, each also the built-in kind that PyTorch would raise."""


class WarpnormError(Exception):
    """Base of every error that warpnorm raises on purpose."""


class InputError(WarpnormError, RuntimeError, ValueError):
    """A tensor or number that the function cannot take: wrong shape, dtype, device or value."""


class InputTypeError(WarpnormError, TypeError):
    """An argument of the wrong Python type."""


class OperatorError(WarpnormError, NotImplementedError):
    """An operator without a row in `trace/operators.py` stands in a traced function."""


class FusionError(WarpnormError, RuntimeError):
    """A function that cannot become one kernel; says which operator, where it stands, why, and what to do."""


class UnavailableError(WarpnormError, RuntimeError):
    """Kernels or native code were asked for where they cannot run."""


class SettingError(WarpnormError, ValueError):
    """A setting that has no such value."""
