"""Random calls held against float64: `warpnorm fuzz`. Nobody imports this folder but cli.py and the tests.

accuracy.py    the one tolerance rule
case.py        one call as a record, and as Python code
draws.py       choices at random, and failing ones made simpler
kinds.py       kinds of calls, but for their sizes: norms by themselves
fused.py       the same of functions with a norm in them
batches.py     several sizes of one kind
truth.py       PyTorch's norms once more, for what float64 is held against
check.py       what is wrong with a call, if anything
run.py         calls until the time is up, each failure made simpler
workers.py     the same by several processes
show.py        a run on a console"""
