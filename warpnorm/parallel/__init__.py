"""Norms whose rows lie on several ranks of torch.distributed.

exchange.py    what ranks tell each other, one message each way, and how it is merged
split.py       a call in three steps: local statistics, the exchange, the results by what was merged; and back
composite.py   the same in PyTorch's operators, for compilers and where neither kernels nor native code run
functional.py  batch_norm over a batch, layer_norm and rms_norm over a hidden dimension that ranks share
modules.py     LayerNorm and RMSNorm with a part of the weights; SyncBatchNorm is in `warpnorm/nn.py`
layout.py      which dimension of a call's elements a mesh splits, and what lies how then
shards.py      the functions of `warpnorm` on DTensors, run on what lies here
opened.py      a fused function on DTensors: its call on what lies here
rules.py       the operators of `library.py` on DTensors: rules for PyTorch's sharding propagation
"""

from warpnorm.parallel import shards
from warpnorm.parallel.exchange import tally
from warpnorm.parallel.functional import batch_norm, layer_norm, rms_norm
from warpnorm.parallel.modules import LayerNorm, RMSNorm

__all__ = ["LayerNorm", "RMSNorm", "batch_norm", "layer_norm", "rms_norm", "shards", "tally"]
