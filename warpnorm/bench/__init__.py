"""Measuring: on whatever device is there, against what people use today. Nobody imports this but `cli.py`.

cases      what is measured, each with its reason
block      a step of a small stack of transformer blocks, by kinds of norms
rivals     what it is measured against, and what is missing here and why
timing     time of one call, and the bandwidth of a copy
check      error against float64; nothing wrong is timed
run        cases x rivals, one after another, with a progress bar
report     tables and result files
results    result files read back, and where each row stands
documents  what `warpnorm report` writes
markdown   its tables
picture    its pictures
page       a folder: the parts of its HTML page
palette    the looks of each library in every picture
inside     what a norm becomes, and what works here
draw       how a kernel reduces one row, as text and as SVG
tune       the offline search over plans
demo       every norm and dtype, checked and timed in a minute or two
"""
