"""Measuring: on whatever device is there, against what people use today. Nobody imports this but `cli.py`.

cases   what is measured, each with its reason
rivals  what it is measured against, and what is missing here and why
timing  time of one call, and the bandwidth of a copy
check   error against float64; nothing wrong is timed
run     cases x rivals, one after another, with a progress bar
report  tables and result files
demo    every norm and dtype, checked and timed in a minute or two
"""
