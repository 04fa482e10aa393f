"""What holds without a GPU and without Triton's interpreter: the house, the border, the reference path, the records.

truth           the norms in extended precision, PyTorch's own answer, and the one tolerance rule
opinfo_checks   PyTorch's own samples, for any device and dtype and for forced kernels too
test_house      imports run one way; rules that every file keeps
test_import     what importing does not do
test_functional the plain calls
test_keywords   what the functions take beyond PyTorch
test_errors     refusals
test_overlap    which tensors share memory
test_opinfo     PyTorch's own samples on the CPU
test_modules    the drop-in modules
channel_truth   the norms by channel in extended precision, and PyTorch's own answer
test_channel_*  batch, group and instance norm: functions, refusals, modules
test_fakes      what a function is recorded on
test_report     the documents that are made of result files
test_docs       what README and docs say, and that their code runs
test_faults     what goes wrong around a call, brought about on purpose
test_security   what may become code, and from where code is run
test_compatibility  what docs/stability.md promises
test_cache      files of generated source
test_problem    collapsed axes, strides and their classes
"""
