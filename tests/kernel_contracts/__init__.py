"""The contracts of the kernels as tests that know no device: `tests/interpreter` and `tests/gpu` each collect them with
a `device` fixture of their own."""
