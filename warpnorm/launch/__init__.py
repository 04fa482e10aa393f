"""Tensors in, tensors out: what is left of a call once its kernel is bound.

forward   one launch
backward  one launch (two for long rows) and the sum of partial rows
autograd  forward and backward as one differentiable operation
"""
