"""Random calls held against float64: `warpnorm fuzz`. Nobody imports this folder but cli.py and the tests.

accuracy.py    the one tolerance rule
case.py        one call as a record, and as Python code
strategies.py  hypothesis strategies of such calls; the only file that imports hypothesis
check.py       what is wrong with a call, if anything
run.py         calls until the time is up, each failure shrunk and printed"""
