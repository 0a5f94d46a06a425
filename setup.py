"""Builds pyg_fast/_C.abi3.so: C++ always, CUDA too where nvcc is found. Never imports torch.

Read from the environment:
    PYG_FAST_CUDA        auto (default: with nvcc, if there), 1 (nvcc or an error), 0 (CPU only)
    PYG_FAST_CUDA_ARCHS  GPU architectures, such as '80;90', or 'all': every major one from 7.5 on
                         (default: those of the GPUs here, all if there are none); '90-virtual'
                         compiles to PTX alone, which is quicker
    MAX_JOBS             parallel compilations (default: one per core)
    CXX, CXXFLAGS, LDFLAGS, CUDA_HOME
"""

import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import NamedTuple, NoReturn

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
MIN_TORCH = (2, 11)
MIN_CUDA_ARCH = 75
VIRTUAL = '-virtual'  # how an architecture ends of which there is PTX alone
PER_ISA = '.isa.cpp'  # how sources end that are compiled once for each of these
ISA_FLAGS = {
    'baseline': [],
    'avx2': ['-mavx2', '-mfma', '-mf16c'],
    'avx512': [
        *('-mavx2', '-mfma', '-mf16c', '-mavx512f', '-mavx512bw', '-mavx512dq', '-mavx512vl'),
        '-mprefer-vector-width=512',
    ],
}


def fail(line: str) -> NoReturn:
    sys.exit(f'pyg_fast: {line}')


def torch_homes() -> list[Path]:
    """Where torch may be, the likeliest first."""
    spec = importlib.util.find_spec('torch')
    if spec and spec.origin:
        return [Path(spec.origin).parent]
    # pip's isolated build hides the site-packages of the environment it installs into.
    base = {'base': sys.base_prefix, 'platbase': sys.base_prefix}
    sites = [
        sysconfig.get_path('platlib'),
        sysconfig.get_path('purelib'),
        sysconfig.get_path('platlib', f'{os.name}_user'),
        sysconfig.get_path('platlib', vars=base),
    ]
    return [Path(site, 'torch') for site in sites]


def find_torch() -> Path:
    wanted = '.'.join(map(str, MIN_TORCH))
    for home in torch_homes():
        if not (home / 'version.py').exists():
            continue
        found = re.search(r"__version__ = '((\d+)\.(\d+)[^']*)'", (home / 'version.py').read_text())
        if not found or (int(found[2]), int(found[3])) < MIN_TORCH:
            fail(f'needs PyTorch >= {wanted}, found {found[1] if found else "another"} in {home}.')
        return home
    fail(
        f'needs PyTorch >= {wanted} to build: install torch into this environment first '
        '(and use --no-build-isolation where the installer is not pip).'
    )


def find_cxx() -> list[str]:
    """The C++ compiler's command, as words."""
    named = shlex.split(os.environ.get('CXX', ''))
    for words in [named] if named else [['c++'], ['g++'], ['clang++']]:
        if path := shutil.which(words[0]):
            return [path, *words[1:]]
    what = f'CXX={os.environ["CXX"]} is not there' if named else 'none was found'
    fail(f'needs a C++17 compiler, {what}: install g++ or clang++, or set CXX.')


def find_nvcc() -> str | None:
    want = os.environ.get('PYG_FAST_CUDA', 'auto')
    if want not in ('auto', '0', '1'):
        fail(f'PYG_FAST_CUDA must be auto, 0 or 1, got {want!r}.')
    if want == '0':
        return None
    home = os.environ.get('CUDA_HOME') or os.environ.get('CUDA_PATH')
    places = [f'{home}/bin/nvcc'] if home else ['nvcc', '/usr/local/cuda/bin/nvcc']
    nvcc = next(filter(None, map(shutil.which, places)), None)
    if want == '1' and nvcc is None:
        fail(f'PYG_FAST_CUDA=1, but there is no {places[0]}: put nvcc on PATH or set CUDA_HOME.')
    return nvcc


def find_ninja() -> str:
    path = os.pathsep.join([os.environ.get('PATH', os.defpath), sysconfig.get_path('scripts')])
    return shutil.which('ninja', path=path) or fail('needs ninja to build: pip install ninja.')


def gpus_here() -> list[int]:
    """Compute capabilities of this machine's GPUs that have kernels, times ten."""
    tool = shutil.which('nvidia-smi')
    if tool is None:
        return []
    command = [tool, '--query-gpu=compute_cap', '--format=csv,noheader']
    listed = subprocess.run(command, capture_output=True, text=True).stdout
    found = re.findall(r'(?m)^(\d+)\.(\d)$', listed)
    return sorted({gpu for a, b in found if (gpu := int(a + b)) >= MIN_CUDA_ARCH})


def cuda_archs(nvcc: str) -> list[str]:
    named = os.environ.get('PYG_FAST_CUDA_ARCHS')
    if named and named != 'all':
        archs = re.split(r'[;,\s]+', named.replace('.', '').strip(';, '))
        if not all(re.fullmatch(r'\d{2,3}[af]?(-virtual)?', arch) for arch in archs):
            fail(f"PYG_FAST_CUDA_ARCHS must look like '80;90' or be all, got {named!r}.")
        return archs
    listed = subprocess.run([nvcc, '--list-gpu-arch'], capture_output=True, text=True)
    known = sorted(map(int, re.findall(r'compute_(\d+)\b', listed.stdout)))
    # Code for 8.0 runs on 8.6 and 8.9 too, though not the other way round.
    here = [
        max((arch for arch in known if gpu // 10 * 10 <= arch <= gpu), default=0)
        for gpu in ([] if named else gpus_here())
    ]
    if here and all(here):
        return list(map(str, sorted(set(here))))
    archs = [str(a) for a in known if a == MIN_CUDA_ARCH or (a > MIN_CUDA_ARCH and a % 10 == 0)]
    return archs or fail(f'{nvcc} --list-gpu-arch names none of {MIN_CUDA_ARCH} or newer.')


class Toolchain(NamedTuple):
    torch: Path
    cxx: list[str]
    nvcc: str | None
    ninja: str

    @classmethod
    def find(cls) -> 'Toolchain':
        if not sys.platform.startswith('linux'):
            fail(f'builds on Linux only, this is {sys.platform}.')
        return cls(find_torch(), find_cxx(), find_nvcc(), find_ninja())

    def host_compiler(self) -> str:
        """The compiler's name alone, as nvcc wants it: no `ccache` before it, no flags behind."""
        return [word for word in self.cxx if not word.startswith('-')][-1]

    def is_x86_64(self) -> bool:
        command = [*self.cxx, '-dumpmachine']
        return subprocess.run(command, capture_output=True, text=True).stdout.startswith('x86_64')


def job_count() -> int:
    jobs = os.environ.get('MAX_JOBS') or str(len(os.sched_getaffinity(0)))
    return int(jobs) if jobs.isdigit() and int(jobs) else fail(f'MAX_JOBS is {jobs!r}, not >= 1.')


def nvcc_link_flag(flag: str) -> str:
    if flag.startswith(('-L', '-l')):
        return flag
    return f'-Xlinker={flag[4:]}' if flag.startswith('-Wl,') else f'-Xcompiler={flag}'


def ninja_file(tools: Toolchain, sources: list[str], jobs: int) -> str:
    """The build as ninja reads it; its default target is `_C.abi3.so`."""

    def quote(words: list[str]) -> str:
        return shlex.join(words).replace('$', '$$')

    def path(name: str) -> str:
        return re.sub(r'([$ :])', r'$\1', name)

    x86 = tools.is_x86_64()
    cxx = [
        *(*tools.cxx, '-O3', '-std=c++17', '-fPIC', '-fvisibility=hidden', '-fno-math-errno'),
        *('-Wall', '-DTORCH_STABLE_ONLY', '-DTORCH_TARGET_VERSION=0x020b000000000000'),
        *(['-DPYG_FAST_WITH_CUDA'] if tools.nvcc else []),
        *(['-DPYG_FAST_X86=1'] if x86 else []),
        *(f'-I{ROOT / "csrc"}', '-isystem', f'{tools.torch}/include'),
        *shlex.split(os.environ.get('CXXFLAGS', '')),
    ]
    link = [
        *('-Wl,--no-as-needed', f'-L{tools.torch}/lib', '-ltorch', '-ltorch_cpu'),
        *('-Wl,--exclude-libs,ALL', '-Wl,--version-script=exports.map', '-Wl,-s'),
        *shlex.split(os.environ.get('LDFLAGS', '')),
    ]
    linker = [*tools.cxx, '-shared']
    if tools.nvcc:  # it knows where its static runtime is
        linker = [tools.nvcc, f'-ccbin={tools.host_compiler()}', '-shared', '-cudart=static']
        link = [nvcc_link_flag(flag) for flag in link]
    lines = [
        'rule cxx',
        f'  command = {quote(cxx)} $isa -MD -MF $out.d -c $in -o $out',
        '  description = C++ $out',
        '  depfile = $out.d',
        '  deps = gcc',
        'rule link',
        f'  command = {quote(linker)} -o $out $in {quote(link)}',
        '  description = link $out',
    ]
    if tools.nvcc:
        archs = cuda_archs(tools.nvcc)
        threads, last = min(jobs, len(archs)), archs[-1].removesuffix(VIRTUAL)
        cuda = [
            *(tools.nvcc, f'-ccbin={tools.host_compiler()}', '-O3', '-std=c++17'),
            '-Xfatbin=-compress-all',  # a third of the size
            *('-Xcompiler=-fPIC,-fvisibility=hidden', f'-I{ROOT / "csrc"}', f'--threads={threads}'),
            *(
                f'-gencode=arch=compute_{arch},code=sm_{arch}'
                for arch in archs
                if not arch.endswith(VIRTUAL)
            ),
            f'-gencode=arch=compute_{last},code=compute_{last}',
        ]
        lines += [
            'pool cuda',
            f'  depth = {max(1, jobs // threads)}',
            'rule cuda',
            f'  command = {quote(cuda)} -MD -MF $out.d -c $in -o $out',
            '  description = CUDA $out',
            '  pool = cuda',
            '  depfile = $out.d',
            '  deps = gcc',
        ]

    # Of a function that several objects hold the linker keeps the first: one that any CPU runs.
    objects: dict[str, list[str]] = {isa: [] for isa in ISA_FLAGS}
    for source in sources:
        stem = source.removeprefix('csrc/').replace('/', '_')
        text = path(str(ROOT / source))
        if source.endswith(PER_ISA):
            for isa in ISA_FLAGS if x86 else ['baseline']:
                flags = ' '.join([f'-DPYG_FAST_ISA={isa}', *ISA_FLAGS[isa]])
                lines += [f'build {stem}.{isa}.o: cxx {text}', f'  isa = {flags}']
                objects[isa].append(f'{stem}.{isa}.o')
        elif tools.nvcc or not source.endswith('.cu'):
            rule = 'cuda' if source.endswith('.cu') else 'cxx'
            lines.append(f'build {stem}.o: {rule} {text}')
            objects['baseline'].append(f'{stem}.o')
    lines.append(f'build _C.abi3.so: link {" ".join(sum(objects.values(), []))}')
    return '\n'.join(lines) + '\n'


class NinjaBuild(build_ext):
    """Finds the tools before any work is done, and says in one line what is missing."""

    def run(self) -> None:
        self.tools = Toolchain.find()
        super().run()

    def build_extension(self, ext: Extension) -> None:
        print(
            f'pyg_fast: torch {self.tools.torch}, C++ {shlex.join(self.tools.cxx)}, '
            f'CUDA {self.tools.nvcc or "off"}'
        )
        # Not build_temp, which an editable install makes afresh: objects are kept between builds.
        work = ROOT / 'build' / f'ninja-{sysconfig.get_platform()}'
        work.mkdir(parents=True, exist_ok=True)
        jobs = job_count()
        (work / 'exports.map').write_text('{ local: *; };\n')
        (work / 'build.ninja').write_text(ninja_file(self.tools, sorted(ext.sources), jobs))
        command = [self.tools.ninja, '-C', str(work), '-j', str(jobs)]
        if subprocess.run(command).returncode:
            fail('the build failed, see above.')
        target = Path(self.get_ext_fullpath(ext.name))
        self.mkpath(str(target.parent))
        self.copy_file(str(work / target.name), str(target))


SOURCES = [
    str(source.relative_to(ROOT))
    for pattern in ('csrc/bindings/*.cpp', 'csrc/cpu/*.cpp', 'csrc/cuda/*.cu')
    for source in ROOT.glob(pattern)
]


def long_description() -> str:
    """README with whole addresses: PyPI shows it without the files beside it."""
    text = (ROOT / 'README.md').read_text(encoding='utf-8')
    return re.sub(r'\]\((?!https?:)', '](https://github.com/pyg-fast/pyg_fast/blob/main/', text)


setup(
    long_description=long_description(),
    ext_modules=[Extension('pyg_fast._C', sorted(SOURCES), py_limited_api=True)],
    cmdclass={'build_ext': NinjaBuild},
)
