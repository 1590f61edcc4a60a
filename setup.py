"""The package's build: the native part, dependencies and extras. Metadata is in pyproject.toml.

The native part is built against the torch that is already installed, which an isolated build does
not see: `pip install --no-build-isolation -e .`. Without torch or without a working compiler the
package installs without it and runs plain torch. Environment:

    LAYERZERO_BUILD_EXT     1: fail where the native part, CUDA included if nvcc is there, cannot be
                            built; 0: do not build it
    LAYERZERO_CUDA_ARCHS    e.g. "80;90;100"; default: docs/internals/pad_copy.md
"""

from __future__ import annotations

import importlib.util
import os
import re
import runpy
import shutil
import subprocess
import sysconfig
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from setuptools import Extension, find_packages, setup
from setuptools.command.build_ext import build_ext

PLANS = ["pyyaml"]
# The newest transformers is for Python 3.11 on; tests that need it are skipped without.
HF = ["transformers>=5.23; python_version >= '3.11'", "accelerate>=1.15; python_version >= '3.11'"]
MODELS = [*HF, "peft; python_version >= '3.11'"]
LIGHTNING = ["lightning>=2.6,<2.7", "finetuning-scheduler>=2.14", *PLANS]
# Megatron's wheels are for Linux; elsewhere it is built, and tests that need it are skipped. Its
# distributed checkpoints want psutil, which it does not ask for: without, saving one hangs.
MEGATRON = ["megatron-core>=0.16.1", "psutil", *PLANS]
MEGATRON_TEST = [f"{name}; sys_platform == 'linux'" for name in MEGATRON]
RAY = ["ray[train]>=2.49"]
# Ray's wheels come late for a new Python; its test is on Linux.
RAY_TEST = [f"{name}; sys_platform == 'linux' and python_version < '3.14'" for name in RAY]
TEST = [
    *("pytest>=8", "pytest-xdist>=3.5", "safetensors>=0.4"),
    *(*PLANS, *MODELS, *LIGHTNING, *MEGATRON_TEST, *RAY_TEST),
]
# `make docs` has an environment of its own for these. ruff breaks long signatures into lines.
DOCS = ["mkdocs-material>=9.5", "mkdocstrings[python]>=1.0", "ruff"]
HERE = Path(__file__).resolve().parent
WANTED = os.environ.get("LAYERZERO_BUILD_EXT", "")
# The oldest torch whose stable ABI is used, hence the oldest that the binary runs with.
TARGET = "-DTORCH_TARGET_VERSION=0x020b000000000000"
CPP_FLAGS = [
    *("-std=c++17", "-O3", "-g0", "-fvisibility=hidden", "-Wall", "-Wextra", TARGET),
    # The order of roundings is the contract of the ops.
    *("-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"),
]
CUDA_FLAGS = ["-std=c++17", "-O3", "-Xcompiler", "-fPIC,-fvisibility=hidden"]


class BuildNative(build_ext):
    """Builds `layerzero/_C.abi3.so`; a failure is one line unless LAYERZERO_BUILD_EXT=1."""

    def run(self) -> None:
        if WANTED == "0":
            say("the native part is not built: LAYERZERO_BUILD_EXT=0")
            return
        if importlib.util.find_spec("torch") is None:
            give_up("torch is not installed here; use pip install --no-build-isolation")
            return
        super().run()

    def build_extension(self, ext: Extension) -> None:
        try:
            self._build(ext)
        except Exception as error:
            give_up(reason_of(error), error)

    def _build(self, ext: Extension) -> None:
        import torch
        from torch.utils.cpp_extension import include_paths, library_paths

        nvcc = find_nvcc()
        folder = Path(self.build_temp)
        ops = runpy.run_path(str(HERE / "layerzero/ops/native.py"))["ops_revision"]()
        flags = [*CPP_FLAGS, f'-DLAYERZERO_OPS="{ops}"']
        # As system headers: warnings are for this project's code.
        flags += [f"-isystem{path}" for path in include_paths()]
        # Each source, the longest to compile first; the compiler's own loop takes one at a time.
        sources = sorted(ext.sources, key=lambda name: name != "csrc/convert.cpp")
        with ThreadPoolExecutor(min(os.cpu_count() or 1, 8)) as pool:

            def compile_cpp(source: str) -> Future[list[str]]:
                return pool.submit(
                    self.compiler.compile,
                    [source],
                    output_dir=str(folder),
                    extra_postargs=flags,
                )

            for source in sources:
                (folder / source).parent.mkdir(parents=True, exist_ok=True)
            running = [compile_cpp(source) for source in sources]
            cuda_running: list[Future[list[str]]] = []
            if nvcc is not None:
                archs = cuda_archs(torch)
                cuda_running = [
                    pool.submit(compile_cuda, nvcc, source, folder, archs)
                    for source in sorted(HERE.glob("csrc/cuda/*.cu"))
                ]
                cuda_running.append(compile_cpp("csrc/pack_cuda.cpp"))
            try:
                objects = [name for future in running for name in future.result()]
            except Exception:
                pool.shutdown(cancel_futures=True)
                raise
            link = partial(
                self.compiler.link_shared_object,
                output_filename=self.get_ext_fullpath(ext.name),
                build_temp=self.build_temp,
                target_lang="c++",
            )
            if nvcc is not None:
                try:
                    cuda_objects = [name for future in cuda_running for name in future.result()]
                    link(
                        [*objects, *cuda_objects],
                        libraries=["torch_cpu", "cudart_static", "rt", "pthread", "dl"],
                        library_dirs=[*library_paths(), *cuda_library_paths(nvcc)],
                        # The runtime's functions must not take the place of those torch uses.
                        extra_postargs=["-Wl,--exclude-libs,libcudart_static.a"],
                    )
                    return
                except Exception as error:
                    give_up(reason_of(error), error, what="the CUDA part")
            link(objects, libraries=["torch_cpu"], library_dirs=library_paths())


def say(text: str) -> None:
    print(f"layerzero: {text}", flush=True)


def give_up(reason: str, error: Exception | None = None, what: str = "the native part") -> None:
    if WANTED == "1":
        raise RuntimeError(f"{what} could not be built: {reason}") from error
    say(f"{what} is not built, plain torch runs instead: {reason}")


def reason_of(error: Exception) -> str:
    """One line; what the compiler said is above it."""
    cause = error.__cause__ or error.__context__
    if isinstance(cause, subprocess.CalledProcessError):
        return f"{cause.cmd[0]} failed with exit status {cause.returncode}"
    return (str(error).strip().splitlines() or [type(error).__name__])[-1][:200]


def find_nvcc() -> str | None:
    homes = [os.environ[name] for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    for home in homes:
        found = shutil.which("nvcc", path=str(Path(home, "bin")))
        if found:
            return found
    return shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")


def cuda_archs(torch: Any) -> list[str]:
    """For whom to compile; each one costs seconds."""
    chosen = os.environ.get("LAYERZERO_CUDA_ARCHS", "").replace(",", ";")
    if chosen.strip("; "):
        return [arch.strip().replace(".", "") for arch in chosen.split(";") if arch.strip()]
    if torch.version.cuda is None:
        # This torch cannot run it: enough to see that it compiles, links and loads.
        return ["90"]
    if torch.cuda.is_available():
        devices = range(torch.cuda.device_count())
        found = {torch.cuda.get_device_capability(device) for device in devices}
        return [f"{major}{minor}" for major, minor in sorted(found)]
    return ["80", "90", "100"]


def compile_cuda(nvcc: str, source: Path, folder: Path, archs: list[str]) -> list[str]:
    target = folder / f"{source.stem}_cu.o"
    codes = [f"-gencode=arch=compute_{arch},code=sm_{arch}" for arch in archs]
    # Newer devices translate the newest one's PTX themselves.
    codes.append(f"-gencode=arch=compute_{archs[-1]},code=compute_{archs[-1]}")
    command = [nvcc, *CUDA_FLAGS, *codes, "-c", str(source), "-o", str(target)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        print(done.stdout + done.stderr, flush=True)
        raise RuntimeError(f"{' '.join(command[:1])} failed on {source.name}, see above")
    return [str(target)]


def cuda_library_paths(nvcc: str) -> list[str]:
    """Where nvcc, which may be a script that calls the real one, links its runtime from."""
    done = subprocess.run(
        [nvcc, "-dryrun", "-x", "cu", "-"], capture_output=True, text=True, input=""
    )
    top = re.search(r"TOP=(.+)", done.stdout + done.stderr)
    homes = [Path(top[1].strip())] if top else []
    homes.append(Path(nvcc).resolve().parents[1])
    folders = [home / name for home in homes for name in ("lib64", "lib")]
    return [str(path) for path in folders if (path / "libcudart_static.a").is_file()]


NATIVE = Extension(
    "layerzero._C",
    sources=[
        f"csrc/{name}.cpp"
        for name in (
            "checks",
            "convert",
            "crc32",
            "delta",
            "module",
            "ordered_sum",
            "pack",
            "step",
            "step_arguments",
            "step_kernels",
            "tensors",
            "word_sums",
        )
    ],
    language="c++",
    # It has no Python code at all; setuptools then leaves it out where it was not built.
    py_limited_api=True,
    optional=True,
)

setup(
    packages=find_packages(include=["layerzero", "layerzero.*"]),
    package_data={"layerzero": ["py.typed"]},
    ext_modules=[NATIVE],
    cmdclass={"build_ext": BuildNative},
    options={}
    if sysconfig.get_config_var("Py_GIL_DISABLED")
    else {"bdist_wheel": {"py_limited_api": "cp310"}},
    install_requires=["torch>=2.11", "numpy"],
    entry_points={
        # Where finetuning-scheduler looks for what belongs to Trainer(strategy="layerzero").
        "finetuning_scheduler.strategy_adapters": [
            "layerzero = layerzero.integrations.finetuning_scheduler:ZeRO3StrategyAdapter"
        ],
    },
    extras_require={
        "examples": ["matplotlib"],
        "plans": PLANS,
        "plots": ["matplotlib"],
        "lightning": LIGHTNING,
        "megatron": MEGATRON,
        "hf": HF,
        "ray": RAY,
        "peers": ["deepspeed", "einops"],  # benchmarks alone; deepspeed 0.19 imports einops unasked
        "test": TEST,
        "dev": [*TEST, "ruff", "mypy", "build", "codespell", "clang-format"],
        "docs": DOCS,
    },
)
