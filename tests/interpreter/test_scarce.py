"""Memory that ends, by the interpreter."""

from kernel_contracts.scarce_contract import *  # noqa: F403
