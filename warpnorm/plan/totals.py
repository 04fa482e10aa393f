"""Plans of the launch that adds up what programs leave behind: blocks of partial sums. Times are of an H200."""

from warpnorm.norms import GROUPS
from warpnorm.plan import grid
from warpnorm.plan.device import Device
from warpnorm.plan.plan import ROW, Plan
from warpnorm.problem import COLUMN, GROUP, BackwardProblem, inner_lines

TALLEST = 128  # rows of a block, at the most


def line(problem: BackwardProblem, device: Device) -> Plan:
    """Partial sums of norms by channel: many for each channel, but few where groups have a value for each sample."""
    summed = [problem.gradients[i] for i in problem.reduced]
    if problem.norm.rows == GROUPS and all(inner_lines(gradient) == len(gradient.row_strides) for gradient in summed):
        return Plan(ROW, 32, 16, 1, why="small blocks")
    # GroupNorm and InstanceNorm backward of 32 x 320 x 64 x 64, channels last, in microseconds: 114 and 121, with 32 rows
    # and a warp 119 and 126; NCHW 70 and 71
    return Plan(ROW, 256, 16, 8, why="tall blocks, so that few steps are enough")


def tall(problem: BackwardProblem, device: Device) -> Plan:
    """Of sums that are one number for many partial ones."""
    return Plan(ROW, 2048, 1, 4, why="one column")


def column(problem: BackwardProblem, plan: Plan, device: Device) -> Plan:
    """Some hundred partial rows, all in L2; the interpreter runs programs one after another, so few of them."""
    if device.is_interpreter:
        return Plan(ROW, 16, 4096, 4, why="few programs")
    # LayerNorm backward of 512 x 1024 fp16, in microseconds: 5.9, 6.9 with 64 rows of 64 columns and 4 warps, 10.1 with 16;
    # of 32768 x 4096: 208, 211 and 219
    tallest, why = TALLEST, "tall and narrow blocks: few steps, and enough programs"
    if all(problem.gradients[i].axes in (COLUMN, GROUP) for i in problem.reduced) and plan.pattern != ROW:
        # LayerNorm backward at 65536, 131072 and 262144, in microseconds: 235, 242 and 261, and with 128 rows 251, 271 and
        # 320; RMSNorm 210, 213 and 217, and 216, 226 and 245
        tallest, why = min(tallest, grid.most_partial_rows(plan, problem)), "as tall as there are partial rows"
    return Plan(ROW, tallest, 32 * (TALLEST // tallest), 8, why=why)
