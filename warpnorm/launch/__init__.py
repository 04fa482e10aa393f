"""Tensors in, tensors out: what is left of a call once its kernel is bound.

forward   what launches have in common, and those of rows: one
backward  the same: one (two for long rows), and the sum of partial rows
column    norms by channel: tasks by turns in one launch, or a launch for each kind
held      norms by channel whose rows stay in registers: one launch
shared    what the programs of a launch tell each other by
lasting   memory that is kept between calls
autograd  forward and backward as one differentiable operation
launcher  calls that were seen before, by compiled code (launcher.cpp): how it is built
described what it is told of a launch
call_text a call as a text, and back
"""
