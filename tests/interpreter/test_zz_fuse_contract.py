from kernel_contracts.fuse_contract import *
