"""Graphs become kernels.

expressions  one node -> one line of Triton
pointwise    a problem -> the source of the functions that its kernel is handed
cache        source -> a file and a module
bind         kernel, functions and plan -> something to launch, with or without a GPU
listing      what compiled code contains
"""
