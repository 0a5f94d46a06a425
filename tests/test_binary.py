"""One wheel for every machine: the libraries and symbols that the extension needs."""

import re
import shutil
import subprocess
from pathlib import Path

import _forks
import pytest

import pyg_fast

MAY_NEED = {
    *('libtorch', 'libtorch_cpu', 'libstdc++', 'libgcc_s'),
    *('libc', 'libm', 'libdl', 'librt', 'libpthread', 'ld-linux-x86-64', 'ld-linux-aarch64'),
}


def unwanted_libraries(dynamic_section: str) -> set[str]:
    """Libraries in the output of `readelf -d` that not every machine with torch has."""
    needed = re.findall(r'\(NEEDED\).*\[(.*?)\.so', dynamic_section)
    return set(needed) - MAY_NEED


def unwanted_symbols(undefined: str) -> set[str]:
    """Symbols in the output of `nm -D --undefined-only` beyond torch's stable ABI and libc."""
    wrong = set()
    for kind, symbol in re.findall(r'^\s+([UvVwW]) (\S+)$', undefined, re.MULTILINE):
        weak = kind != 'U'
        if re.match(r'(aoti_torch|torch)_(?!device_type).*cuda', symbol):
            fine = weak  # it is in CUDA builds of torch only
        elif re.match(r'(aoti_torch|torch)_', symbol):
            fine = True
        else:  # libc, libm, libstdc++ and libgcc name a version, torch and CUDA never
            fine = weak or bool(re.search(r'@(GLIBC|GLIBCXX|CXXABI|GCC)_', symbol))
        if not fine:
            wrong.add(symbol)
    return wrong


@pytest.fixture(scope='module')
def extension() -> Path:
    (path,) = Path(pyg_fast.__file__).parent.glob('_C.abi3.so')
    return path


def tool_output(*command: str) -> str:
    if shutil.which(command[0]) is None:
        pytest.skip(f'no {command[0]} (binutils)')
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_needs_no_cuda_library(extension: Path) -> None:
    section = tool_output('readelf', '-d', str(extension))
    assert '[libtorch_cpu.so]' in section
    assert unwanted_libraries(section) == set()


def test_uses_the_stable_abi_only(extension: Path) -> None:
    undefined = tool_output('nm', '-D', '--undefined-only', str(extension))
    assert 'aoti_torch_' in undefined
    assert unwanted_symbols(undefined) == set()


def test_exports_nothing(extension: Path) -> None:
    defined = tool_output('nm', '-D', '--defined-only', str(extension))
    assert defined.strip() == ''


def test_unwanted_library_is_found() -> None:
    section = (
        ' 0x0000000000000001 (NEEDED)             Shared library: [libtorch.so]\n'
        ' 0x0000000000000001 (NEEDED)             Shared library: [libcudart.so.13]\n'
        ' 0x0000000000000001 (NEEDED)             Shared library: [libc10.so]\n'
        ' 0x000000000000000e (SONAME)             Library soname: [libother.so]\n'
    )
    assert unwanted_libraries(section) == {'libcudart', 'libc10'}


def test_unwanted_symbol_is_found() -> None:
    undefined = (
        '                 U memcpy@GLIBC_2.14\n'
        '                 w __gmon_start__\n'
        '                 U aoti_torch_get_dim\n'
        '                 U _ZN3c105ErrorD1Ev\n'
        '                 U _ZNK2at10TensorBase4dataEv\n'
        '                 U cusparseSpMM\n'
        '                 U PyList_New\n'
        '                 U aoti_torch_get_current_cuda_stream\n'
    )
    assert unwanted_symbols(undefined) == {
        *('_ZN3c105ErrorD1Ev', '_ZNK2at10TensorBase4dataEv', 'cusparseSpMM', 'PyList_New'),
        'aoti_torch_get_current_cuda_stream',
    }
    assert unwanted_symbols(undefined.replace('U aoti', 'w aoti')) == {
        *('_ZN3c105ErrorD1Ev', '_ZNK2at10TensorBase4dataEv', 'cusparseSpMM', 'PyList_New'),
    }


@pytest.mark.parametrize(('extension', 'text'), [(None, 'is missing'), ('', 'does not load')])
def test_errors(tmp_path: Path, extension: str | None, text: str) -> None:
    """The import tells what to do."""
    package = tmp_path / 'pyg_fast'
    shutil.copytree(Path(pyg_fast.__file__).parent, package, ignore=shutil.ignore_patterns('*.so'))
    if extension is not None:
        (package / '_C.abi3.so').write_text(extension)
    again = (  # The fork has imported torch, and the package from elsewhere.
        'import sys\n'
        'for name in [*sys.modules]:\n'
        "    if name.partition('.')[0] == 'pyg_fast':\n"
        '        del sys.modules[name]\n'
        'import pyg_fast'
    )
    found = _forks.run('-c', again, cwd=tmp_path)
    assert found.returncode == 1
    last = found.stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError: pyg_fast's compiled extension")
    assert text in last
    assert "'pip install .'" in last
