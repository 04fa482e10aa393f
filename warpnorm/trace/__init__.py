"""A PyTorch function becomes a pointwise graph. No Triton here.

graph          a torch.fx graph -> the frozen record
operators      the one table: aten operator -> Triton expression
capture        a function -> its graph
differentiate  a function -> the graph of its gradients
"""
