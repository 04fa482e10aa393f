"""A problem and a device become a plan. Pure Python, no GPU needed.

device  the numbers of a device that plans follow from
plan    the frozen record of what was chosen
choose  the heuristics, and those of rows in registers
narrow  those of rows of which a program may have several
wide    those of rows that lie in registers as they do in memory
teams   those of programs that share a row
pieces  those of rows in pieces that stay in registers
tiles   those of tiles that are visited twice
totals  those of the launch that adds up partial sums
needs   what a problem needs of a device
grid    how many programs run a plan
"""
