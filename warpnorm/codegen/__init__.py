"""Graphs become kernels.

expressions  one node -> one line of Triton
pointwise    a problem -> the source of the functions that its kernel is handed
rewritten    the same source in other words
kept         what the second visit of a tile need not compute again
along        which sums of a backward problem run along rows, which over them
cache        source -> a file and a module
arguments    what the compiler is told about a kernel's arguments
bind         kernel, functions and plan -> something to launch, with or without a GPU
listing      what compiled code contains
reduction    how it reduces a row
"""
