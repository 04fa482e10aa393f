"""Graphs become Triton source, and source with a hand-written kernel becomes something to launch.

pointwise  a problem -> the source of the functions that its kernel is handed
cache      source -> an imported module, by way of a file (Triton reads source from files)
bind       kernel + functions + plan -> a bound kernel, compiled for a target or interpreted
"""
