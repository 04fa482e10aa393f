"""The same problems as native code: a graph becomes C, the system's compiler builds it, threads share the rows.

writer    what all C has in common: values, addresses, arrays, statistics
source    problem -> C: the two pointwise steps around the statistic, row by row
across    the same where memory runs across rows, by tiles
gradients which sums backward needs, and how they are kept
settle    partial sums -> gradients
fallback  PyTorch's operators, where the compiler refuses
build     C -> library, cached by text, flags and processor
run       tensors in, tensors out
memory    of large results: in huge pages, and kept for the next result when it is gone
pool.c    threads that wait for work; pointwise.h: elementwise functions that the compiler can vectorize"""
