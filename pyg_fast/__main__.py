"""Prints data for a bug report, and tests every op on this machine: python -m pyg_fast

`python -m pyg_fast ops` lists the raw ops instead.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

import torch

from . import __version__, with_cuda
from ._self_test import self_test
from .ops._library import fakes
from .ops._library import ops as raw_ops

_AVX2 = {'avx2', 'fma'}
_AVX512 = _AVX2 | {'avx512f', 'avx512bw', 'avx512dq', 'avx512vl'}
_CPU_ISA = 'PYG_FAST_CPU_ISA'


def main(args: Sequence[str] | None = None) -> int:
    """Prints the report, and returns 1 if an op fails."""
    parser = argparse.ArgumentParser('python -m pyg_fast', description=__doc__.split(':')[0])
    parser.add_argument('what', nargs='?', choices=['ops'], help='list the raw ops instead')
    if parser.parse_args(args).what == 'ops':
        print('\n'.join(table_of_ops()))
        return 0
    facts = environment()
    width = max(map(len, facts))
    for name, value in facts.items():
        print(f'{name:{width}}  {value}')

    failed = 0
    for device in ['cpu', *(['cuda'] if _has_cuda() else [])]:
        start = time.perf_counter()
        print(f'\nSelf-test on {device}')
        for op, error in self_test(device):
            failed += error is not None
            print(f'  {op:18} {"ok" if error is None else f"FAILED: {error}"}', flush=True)
        print(f'  {time.perf_counter() - start:.1f} s')
    print(f'\n{failed} checks failed.' if failed else '\nAll is well.')
    return int(failed > 0)


def table_of_ops() -> list[str]:
    """The raw ops with their schemas, by the file of their fake kernel and reference."""
    files: dict[str, list[str]] = {}
    for op in vars(raw_ops):
        # The two ops without tensors have no fake kernel.
        module = fakes[op].__module__ if op in fakes else with_cuda.__module__
        schema = str(getattr(torch.ops.pyg_fast, op).default._schema)
        files.setdefault(module.replace('.', '/') + '.py', []).append(schema)
    return [
        line
        for file in sorted(files)
        for line in (file, *(f'  {schema.split("::")[1]}' for schema in sorted(files[file])))
    ]


def environment() -> dict[str, str]:
    """Versions and hardware that the kernels run on, one line for each name."""
    facts = {
        'pyg_fast': f'{__version__} ({Path(__file__).parent})',
        'python': f'{platform.python_version()} on {platform.platform()}',
        'torch': str(torch.__version__),
        **{name: _version(name) for name in ('torch-geometric', 'torch-sparse', 'torch-scatter')},
        'CUDA of torch': torch.version.cuda or 'none',
        'NVIDIA driver': _driver(),
        'CUDA kernels': 'compiled in' if with_cuda() else 'not compiled in',
    }
    for k in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(k)
        facts[f'GPU {k}'] = (
            f'{gpu.name}, compute capability {gpu.major}.{gpu.minor}, '
            f'{gpu.total_memory / 2**30:.0f} GiB'
        )
    if torch.cuda.device_count() == 0:
        facts['GPU'] = 'none'
    cap = os.environ.get(_CPU_ISA)
    model, flags = _cpu()
    facts['CPU'] = f'{model}, {os.cpu_count()} logical cores'
    facts['CPU kernels'] = (
        f'{instruction_set(flags, cap)} ({_CPU_ISA}={cap if cap is not None else "not set"})'
    )
    facts['threads'] = str(torch.get_num_threads())
    return facts


def instruction_set(flags: set[str], cap: str | None = None) -> str:
    """The choice of our CPU kernels' dispatch (csrc/cpu/isa.cpp) for a CPU with these flags and
    this cap."""
    if flags >= _AVX512 and cap not in ('baseline', 'avx2'):
        return 'avx512'
    if flags >= _AVX2 and cap != 'baseline':
        return 'avx2'
    return 'baseline'


def _cpu() -> tuple[str, set[str]]:
    model, flags = platform.processor() or platform.machine(), set()
    info = Path('/proc/cpuinfo')
    for line in info.read_text().splitlines() if info.exists() else []:
        name, _, value = line.partition(':')
        if name.strip() == 'model name':
            model = value.strip()
        elif name.strip() == 'flags':
            flags = set(value.split())
    return model, flags


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return 'not installed'


def _driver() -> str:
    tool = shutil.which('nvidia-smi')
    if tool is None:
        return 'not found'
    query = [tool, '--query-gpu=driver_version', '--format=csv,noheader']
    try:
        out = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError) as e:
        return f'not known ({type(e).__name__} of nvidia-smi)'
    return out.split('\n')[0].strip() or 'not known'


def _has_cuda() -> bool:
    return with_cuda() and torch.cuda.is_available()


if __name__ == '__main__':
    sys.exit(main())
