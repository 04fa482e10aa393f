"""The version, where everything may read it."""

VERSION = "0.1.0"
