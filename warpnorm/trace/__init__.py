"""A PyTorch function becomes pointwise graphs around a norm. No Triton here.

environment    what a function reads besides its arguments: a key, and tensors
bytecode       what its code reads, by its instructions
fakes          the tensors without memory on which that happens
record         a user's function, run once on fake tensors, is written down or refused at its line
calls          what it calls, before PyTorch takes it apart
handlers       what is done with the norms and with dropout
expression     a recorded piece: PyTorch's operators in order, a frozen record that can be called
fusion         a recorded function, cut at its norm, is a call like any other
checks         whether its operators have rows in the table, or which has none
dropout        its mask as an operator
capture        a function or an expression -> the graph of its primitive operators
differentiate  the same of its gradients
at_hand        what backward need not read or write twice: a sum that is an output, gradients that are one tensor
store          graphs that were traced before, in the cache folder
symbolic       a call as one node of `torch.fx.symbolic_trace`
graph          a torch.fx graph -> the frozen record
operators      the one table: primitive operator -> Triton and C
"""
