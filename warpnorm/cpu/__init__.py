"""The same problems as native code: a graph becomes C, the system's compiler builds it, threads share the rows.

source    problem -> C: the two pointwise steps around the statistic, row by row
build     C -> library, cached by text, flags and processor
run       tensors in, tensors out
pool.c    threads that wait for work; pointwise.h: elementwise functions that the compiler can vectorize"""
