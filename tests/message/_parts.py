"""The private parts of `pyg_fast.message` that tests call: they know these by this module alone."""

from pyg_fast.message import (
    _blocks,
    _cpu,
    _cuda,
    _entry,
    _ir,
    _passes,
    _pieces,
    _plan,
    _replace,
    _run,
    _statistics,
    _tiles,
    _tiles_cuda,
    _triton,
)

__all__ = [
    'BINARY', 'EDGE', 'FORMS', 'SRC', 'UNARY', 'Form', 'Out', 'Pass', 'Passes', 'Pieces', 'Plan',
    'Program', 'Recipe', 'Schedule', 'Value', '_blocks', '_cuda', '_entry', '_passes', '_pieces',
    '_plan', '_replace', '_run', '_tiles', '_tiles_cuda', 'combine_kernel', 'divide_rows',
    'is_float', 'jit_function', 'run_pass_cpu', 'statistics_blocks', 'statistics_kernel',
]  # fmt: skip

# Programs of messages, and what divides them into passes.
BINARY, EDGE, SRC, UNARY = _ir.BINARY, _ir.EDGE, _ir.SRC, _ir.UNARY
Program, Value, is_float = _ir.Program, _ir.Value, _ir.is_float
Pass, Passes, Plan, Out = _passes.Pass, _passes.Passes, _plan.Plan, _triton.Out

# What runs a pass on a CPU, and on a GPU.
run_pass_cpu = _cpu.run_pass_cpu
Recipe, Schedule, jit_function = _cuda.Recipe, _cuda.Schedule, _cuda.jit_function

# Long rows, and statistics of them.
FORMS, Form, Pieces = _pieces.FORMS, _pieces.Form, _pieces.Pieces
combine_kernel, divide_rows = _pieces.combine_kernel, _pieces.divide_rows
statistics_blocks, statistics_kernel = _statistics.statistics_blocks, _statistics.statistics_kernel
