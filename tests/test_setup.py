"""setup.py: its builds, and the line that ends a failed one. Compiles a toy, not csrc."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]
VERSION = '1.2.3'
NEVER_IMPORT = "raise ImportError('the build must not import this')\n"
STDERR_TAIL = re.compile(r'pyg_fast: [^\n]+\n\Z')

Environment = dict[str, str]


def run_setup(project: Path, env: Environment, *arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, 'setup.py', *arguments]
    return subprocess.run(command, cwd=project, env=env, capture_output=True, text=True)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A copy of the build with a toy in place of csrc."""
    project = tmp_path / 'project'
    files = {
        'pyg_fast/__init__.py': f"__version__ = '{VERSION}'\n{NEVER_IMPORT}",
        'csrc/one.h': 'inline int one() { return 1; }\n',
        'csrc/bindings/toy.cpp': '#include "one.h"\nint toy() { return one(); }\n',
        'csrc/cpu/kernel.isa.cpp': 'namespace PYG_FAST_ISA { int kernel() { return 2; } }\n',
        'csrc/cuda/toy.cu': '__global__ void toy_kernel() {}\n',
    }
    for name, text in files.items():
        (project / name).parent.mkdir(parents=True, exist_ok=True)
        (project / name).write_text(text)
    names = ['setup.py', 'setup.cfg', 'pyproject.toml', 'MANIFEST.in', 'README.md', 'LICENSE']
    for name in names:
        shutil.copyfile(ROOT / name, project / name)
    return project


@pytest.fixture
def env(tmp_path: Path) -> Environment:
    """No settings of the caller, no nvcc, and only the programs of `tmp_path/bin`."""
    programs = tmp_path / 'bin'
    programs.mkdir()
    # Of this environment first: elsewhere may be a wrapper, which needs more programs.
    path = os.pathsep.join([sysconfig.get_path('scripts'), os.environ['PATH']])
    for name in ('c++', 'as', 'ld', 'ninja', 'sh'):
        if found := shutil.which(name, path=path):
            (programs / name).symlink_to(found)
    own = ('PYG_FAST_CUDA', 'PYG_FAST_CUDA_ARCHS', 'MAX_JOBS', 'CXX', 'CXXFLAGS', 'LDFLAGS')
    kept = {name: value for name, value in os.environ.items() if name not in own}
    return kept | {'PATH': str(programs), 'PYG_FAST_CUDA': '0'}


@pytest.fixture
def compiler(env: Environment) -> None:
    if shutil.which('c++', path=env['PATH']) is None:
        pytest.skip('no c++')


def fake_nvcc(env: Environment, home: Path, lists: str = 'compute_80') -> None:
    """Stands in for nvcc where only its presence counts."""
    (home / 'bin').mkdir(parents=True)
    (home / 'bin/nvcc').write_text(f'#!/bin/sh\necho {lists}\n')
    (home / 'bin/nvcc').chmod(0o755)
    env['CUDA_HOME'] = str(home)


def fake_torch(env: Environment, folder: Path, version: str) -> None:
    (folder / 'torch').mkdir(parents=True)
    (folder / 'torch/__init__.py').write_text(NEVER_IMPORT)
    (folder / 'torch/version.py').write_text(f"__version__ = '{version}'\n")
    env['PYTHONPATH'] = str(folder)


def refusal(project: Path, env: Environment, *flags: str) -> str:
    """The line that ends a build that must fail; nothing may be compiled before it."""
    done = run_setup(project, env, *flags, 'build_ext')
    assert done.returncode == 1
    assert 'Traceback' not in done.stderr
    assert not list(project.rglob('*.o'))
    assert STDERR_TAIL.search(done.stderr), done.stderr
    return done.stderr.splitlines()[-1]


def test_no_compiler(project: Path, env: Environment) -> None:
    env['PATH'] = str(project)
    assert 'needs a C++17 compiler, none was found: install g++' in refusal(project, env)


def test_named_compiler_is_missing(project: Path, env: Environment) -> None:
    env['CXX'] = 'no-such-compiler -m64'
    assert 'CXX=no-such-compiler -m64 is not there' in refusal(project, env)


def test_old_torch(project: Path, env: Environment, tmp_path: Path) -> None:
    fake_torch(env, tmp_path / 'site', '2.10.1')
    line = refusal(project, env)
    assert 'needs PyTorch >= 2.11, found 2.10.1 in' in line


def test_no_torch(project: Path, env: Environment, tmp_path: Path) -> None:
    venv = tmp_path / 'venv'
    subprocess.run([sys.executable, '-m', 'venv', '--without-pip', venv], check=True)
    import setuptools

    site = Path(setuptools.__file__).parents[1]
    for name in ('setuptools', '_distutils_hack'):
        (tmp_path / 'site').mkdir(exist_ok=True)
        (tmp_path / 'site' / name).symlink_to(site / name)
    env |= {'PYTHONPATH': str(tmp_path / 'site'), 'PYTHONUSERBASE': str(tmp_path)}
    python = venv / 'bin/python'
    base = {'base': sys.base_prefix, 'platbase': sys.base_prefix}
    in_base = Path(sysconfig.get_path('platlib', vars=base), 'torch').exists()
    visible = subprocess.run([python, '-c', 'import torch'], env=env, capture_output=True)
    if in_base or visible.returncode == 0:
        pytest.skip('torch is visible from everywhere')
    command = [python, 'setup.py', 'build_ext']
    done = subprocess.run(command, cwd=project, env=env, capture_output=True, text=True)
    assert done.returncode == 1
    assert 'Traceback' not in done.stderr
    assert STDERR_TAIL.search(done.stderr), done.stderr
    assert 'needs PyTorch >= 2.11 to build: install torch' in done.stderr


def test_cuda_without_nvcc(project: Path, env: Environment, tmp_path: Path) -> None:
    env |= {'PYG_FAST_CUDA': '1', 'CUDA_HOME': str(tmp_path)}
    assert f'PYG_FAST_CUDA=1, but there is no {tmp_path}/bin/nvcc' in refusal(project, env)


@pytest.mark.parametrize(
    ('settings', 'line'),
    [
        ({'PYG_FAST_CUDA': 'yes'}, "PYG_FAST_CUDA must be auto, 0 or 1, got 'yes'."),
        ({'MAX_JOBS': '0'}, "MAX_JOBS is '0', not >= 1."),
        ({'MAX_JOBS': 'all'}, "MAX_JOBS is 'all', not >= 1."),
    ],
)
@pytest.mark.usefixtures('compiler')
def test_bad_setting(project: Path, env: Environment, settings: Environment, line: str) -> None:
    assert refusal(project, env | settings).endswith(line)


@pytest.mark.usefixtures('compiler')
def test_bad_archs(project: Path, env: Environment, tmp_path: Path) -> None:
    fake_nvcc(env, tmp_path / 'cuda')
    env |= {'PYG_FAST_CUDA': '1', 'PYG_FAST_CUDA_ARCHS': 'hopper'}
    line = refusal(project, env)
    assert line.endswith("PYG_FAST_CUDA_ARCHS must look like '80;90' or be all, got 'hopper'.")


@pytest.mark.usefixtures('compiler')
def test_broken_nvcc(project: Path, env: Environment, tmp_path: Path) -> None:
    fake_nvcc(env, tmp_path / 'cuda', lists='')
    line = refusal(project, env | {'PYG_FAST_CUDA': '1'})
    assert line.endswith('/bin/nvcc --list-gpu-arch names none of 75 or newer.')


@pytest.mark.parametrize('command', ['--version', 'egg_info', 'sdist'])
def test_needs_no_tools(project: Path, env: Environment, tmp_path: Path, command: str) -> None:
    fake_torch(env, tmp_path / 'site', '1.0.0')
    done = run_setup(project, env | {'PATH': str(project)}, command)
    assert done.returncode == 0, done.stderr
    if command == '--version':
        assert done.stdout.split()[-1] == VERSION


def test_version_is_the_packages() -> None:
    import pyg_fast

    done = run_setup(ROOT, dict(os.environ), '--version')
    assert done.stdout.split()[-1] == pyg_fast.__version__


def listed(project: Path) -> str:
    (file,) = project.glob('build/ninja-*/build.ninja')
    return file.read_text()


@pytest.mark.usefixtures('compiler')
def test_one_wheel_for_every_python(project: Path, env: Environment) -> None:
    done = run_setup(project, env, 'bdist_wheel')
    assert done.returncode == 0, done.stderr
    (wheel,) = project.glob('dist/*.whl')
    assert wheel.name.startswith(f'pyg_fast-{VERSION}-cp310-abi3-linux_')
    names = zipfile.ZipFile(wheel).namelist()
    assert {'pyg_fast/__init__.py', 'pyg_fast/_C.abi3.so'} <= set(names)
    assert not [name for name in names if name.startswith(('csrc', 'tests', 'build'))]
    assert str(Path(torch.__file__).parent) in listed(project)
    assert 'toy.cu' not in listed(project)
    assert 'WITH_CUDA' not in listed(project)


@pytest.mark.usefixtures('compiler')
def test_kernels_once_per_instruction_set(project: Path, env: Environment) -> None:
    done = run_setup(project, env, 'build_ext', '--inplace')
    assert done.returncode == 0, done.stderr
    assert (project / 'pyg_fast/_C.abi3.so').exists()
    machine = subprocess.run(
        ['c++', '-dumpmachine'], env=env, capture_output=True, text=True, check=True
    ).stdout
    isas = ['baseline', 'avx2', 'avx512'] if machine.startswith('x86_64') else ['baseline']
    objects = [f'cpu_kernel.isa.cpp.{isa}.o' for isa in isas]
    link = re.search(r'^build _C.abi3.so: link (.*)$', listed(project), re.MULTILINE)
    assert link is not None
    # Later objects only add to what earlier ones define: the order keeps old machines safe.
    assert [name for name in link[1].split() if 'kernel' in name] == objects
    assert set(link[1].split()[-2:]) <= {*objects, 'bindings_toy.cpp.o'}
    assert 'march=native' not in listed(project)
    assert 'fast-math' not in listed(project)


@pytest.mark.usefixtures('compiler')
def test_rebuilds_what_a_header_changed(project: Path, env: Environment) -> None:
    def built() -> list[str]:
        done = run_setup(project, env | {'MAX_JOBS': '1'}, 'build_ext', '--inplace')
        assert done.returncode == 0, done.stderr
        return re.findall(r'^\[\d+/\d+\] \S+ (\S+)$', done.stdout, re.MULTILINE)

    assert 'cpu_kernel.isa.cpp.baseline.o' in built()
    assert built() == []
    (project / 'csrc/one.h').write_text('inline int one() { return 3; }\n')
    assert built() == ['bindings_toy.cpp.o', '_C.abi3.so']


@pytest.mark.usefixtures('compiler')
def test_cuda_architectures(project: Path, env: Environment, tmp_path: Path) -> None:
    fake_nvcc(env, tmp_path / 'cuda')
    env |= {'PYG_FAST_CUDA': 'auto', 'PYG_FAST_CUDA_ARCHS': '8.0;90'}
    run_setup(project, env, 'build_ext')
    rules = listed(project)
    assert '-gencode=arch=compute_80,code=sm_80' in rules
    assert '-gencode=arch=compute_90,code=sm_90 -gencode=arch=compute_90,code=compute_90' in rules
    assert '-DPYG_FAST_WITH_CUDA' in rules
    assert '-cudart=static' in rules
    env['PYG_FAST_CUDA_ARCHS'] = '80;90-virtual'
    run_setup(project, env, 'build_ext')
    assert re.findall(r',code=(\w+)', listed(project)) == ['sm_80', 'compute_90']
    del env['PYG_FAST_CUDA_ARCHS']
    fake_nvcc(env, tmp_path / 'other', lists='compute_70 compute_80 compute_86')
    run_setup(project, env, 'build_ext')
    assert re.findall(r',code=(\w+)', listed(project)) == ['sm_80', 'compute_80']


@pytest.mark.usefixtures('compiler')
@pytest.mark.parametrize(
    ('gpus', 'asked', 'expected'),
    [
        ('8.6', None, ['86']),
        ('9.0\n7.5\n9.0', None, ['75', '90']),
        ('8.9', None, ['86']),  # the newest code that runs on it
        ('9.0\n6.1', None, ['90']),  # too old for kernels
        ('6.1', None, ['75', '80', '90']),
        ('12.0', None, ['75', '80', '90']),  # nvcc knows none of its generation
        ('9.0', 'all', ['75', '80', '90']),
        ('9.0', '80', ['80']),
    ],
)
def test_architectures_of_gpus_here(
    project: Path, env: Environment, tmp_path: Path, gpus: str, asked: str, expected: list[str]
) -> None:
    fake_nvcc(env, tmp_path / 'cuda', lists='compute_75 compute_80 compute_86 compute_90')
    smi = tmp_path / 'bin/nvidia-smi'
    smi.write_text(f'#!/bin/sh\necho "{gpus}"\n')
    smi.chmod(0o755)
    env |= {'PYG_FAST_CUDA': '1'} | ({'PYG_FAST_CUDA_ARCHS': asked} if asked else {})
    run_setup(project, env, 'build_ext')
    assert re.findall(r',code=sm_(\w+)', listed(project)) == expected
