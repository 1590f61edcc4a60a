# Everything a newcomer needs: `make train`, `make test`. Flags go in ARGS, e.g.
#   make train ARGS="--steps 50 --engine ddp"        make test ARGS="-k layout"

PYTHON ?= python3
ARGS ?=

# Another torch than that of constraints.txt, in an environment of its own: make test TORCH=2.11.0
TORCH ?=
VENV := .venv$(TORCH:%=-torch-%)
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
NATIVE_SOURCES := $(wildcard csrc/*.cpp csrc/*.h csrc/*.inc csrc/cuda/*.cu csrc/cuda/*.h tests/ops/*.cpp)
PIP_INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile --constraint $(VENV)/constraints.txt

# Tests start Python by the hundred: none is to compile again what it imports.
export PYTHONDONTWRITEBYTECODE :=
# Two fifths of all installed Python, of which little or nothing is imported here: Python compiles that.
NOT_COMPILED := /(tests|transformers/models|ray/(rllib|serve|tune|dashboard)|sympy/physics|mypyc?|fontTools)/

CORES := $(shell nproc 2>/dev/null || getconf _NPROCESSORS_ONLN)
# Half of the cores, at least one: two ranks share the machine.
HALF_CORES := $(shell echo $$(( $(CORES) > 1 ? $(CORES) / 2 : 1 )))
# Some tests only wait for a timeout to run out: the others use the cores meanwhile.
WORKERS := $(shell echo $$(( $(CORES) + 1 )))

.PHONY: help venv train test test-processors soak faults check bench gpu docs docs-figures wheel clean

help:
	@echo 'make train   train a small language model, sharded by layerzero   ARGS="--help" lists flags'
	@echo 'make test    run the test suite                                   ARGS goes to pytest'
	@echo 'make test-processors  the numeric tests as on other processors, a line for each setting of MKL, ATen and oneDNN'
	@echo 'make soak    random models and actions, SEEDS=200; CASES=10000 damaged files; 10,000 flipped bits;'
	@echo '             and sweeps in full of which make test takes a case of each class'
	@echo 'make faults  ranks killed at every call that writes a checkpoint; the fault matrix'
	@echo 'make check   ruff, mypy, codespell and clang-format'
	@echo 'make bench   pad-copy beside memcpy; host overhead, construction, step time, layered ZeRO, checkpoints beside others'
	@echo 'make gpu     is it right on this GPU, and fast beside fully_shard? 6 minutes at most, writes build/gpu'
	@echo '                                                                    ARGS=--cpu runs what a CPU can'
	@echo 'make docs    the pages and an API reference as a site, in build/site; make docs-figures draws the pictures'
	@echo 'make wheel   a wheel and a source distribution, in dist/'
	@echo 'make clean   remove the environment, builds and caches, but no results'
	@echo
	@echo 'The first of them sets up .venv and builds the kernels of csrc/ where a compiler is;'
	@echo 'LAYERZERO_BUILD_EXT=1 makes it fail where they cannot be built.'

venv: $(INSTALLED)

# One process a GPU, or two on the CPU.
train: $(INSTALLED)
	@$(BIN)/python examples/lm_launcher.py $(ARGS)

# One thread a process: pytest-xdist already fills the cores, and each test starts ranks of its own.
# Tests of one file, which wait alike, stay on one worker until another has nothing left.
test: $(INSTALLED)
	@echo 'The tests are imported and collected first; on 2 quiet cores of an AMD EPYC all take 8 to 10 minutes.'
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal $(ARGS)

# Each setting in turn takes a few minutes; make test runs two of them on a few files.
test-processors: $(INSTALLED)
	$(BIN)/python -m tests.processors $(ARGS)

# What make test does with a few seeds and stages, in full; before a release, or after a change of
# the engine or of what writes checkpoints.
SEEDS ?= 200
CASES ?= 10000
SWEEPS := exceptions norms memory_budget ledger \
	host_work howto optional_modules delta join layered whole_tensor checkpoint \
	checkpoint_optimizers checkpoint_splits parallel_transformers offload flat_optimizer streams \
	fault_matrix example missing_waits groups grads graph_capture arena
soak: $(INSTALLED)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -k fuzzed --cases $(CASES) $(ARGS)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/distributed/test_random_models.py \
		tests/distributed/test_random_parallel.py tests/distributed/test_pipeline.py \
		--slow -k random --seeds $(SEEDS) $(ARGS)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -s tests/distributed/test_checked_bytes.py --slow --seeds $(SEEDS) $(ARGS)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(SWEEPS:%=tests/distributed/test_%.py) \
		tests/ops/test_cuda_build.py tests/ops/test_cuda_emulation.py tests/integrations/test_megatron.py \
		--slow --seeds $(SEEDS) $(ARGS)

faults: $(INSTALLED)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/distributed/test_checkpoint_safety.py \
		tests/distributed/test_fault_matrix.py --every-fault --slow $(ARGS)

check: $(INSTALLED)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy layerzero
	cd benchmarks && MYPYPATH=.. ../$(BIN)/mypy --config-file ../.mypy.ini $(filter-out gpu_% bench_gpu_step.py,$(notdir $(wildcard benchmarks/*.py)))
	$(BIN)/codespell
	$(BIN)/clang-format --dry-run --Werror $(NATIVE_SOURCES)

bench: $(INSTALLED)
	$(BIN)/python benchmarks/bench_pad_copy.py
	$(BIN)/python benchmarks/bench_host_work.py
	$(BIN)/python benchmarks/bench_scale.py
	OMP_NUM_THREADS=$(HALF_CORES) $(BIN)/python benchmarks/bench_step.py
	$(BIN)/python benchmarks/bench_layered.py
	$(BIN)/python benchmarks/bench_checkpoint.py

# With the environment of .venv where it is set up, else with $(PYTHON) as it is: a machine with a GPU
# often has a torch of its own, and no network. Builds the kernels for that GPU where they are missing.
GPU_PYTHON := $(if $(wildcard $(INSTALLED)),$(BIN)/python,$(PYTHON))
gpu:
	$(GPU_PYTHON) -m tests.gpu.day $(ARGS)

# In an environment of its own: docstrings are read from the source, so torch is not needed.
DOCS_VENV := .venv-docs
docs: $(DOCS_VENV)/.installed
	NO_MKDOCS_2_WARNING=1 PYTHONDONTWRITEBYTECODE=1 $(DOCS_VENV)/bin/mkdocs build $(ARGS)

$(DOCS_VENV)/.installed: constraints.txt
	$(PYTHON) -m venv $(DOCS_VENV)
	$(DOCS_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt \
		mkdocs-material 'mkdocstrings[python]' ruff
	@touch $@

# From runs on this machine, which should have nothing else to do.
docs-figures: $(INSTALLED)
	$(BIN)/python docs/figures/zero3.py
	OMP_NUM_THREADS=$(HALF_CORES) $(BIN)/python docs/figures/overlap.py
	OMP_NUM_THREADS=$(HALF_CORES) $(BIN)/python docs/figures/ledger.py
	OMP_NUM_THREADS=1 $(BIN)/python docs/figures/losses.py
	$(BIN)/python docs/figures/measured.py

# One wheel serves every Python from 3.10 and every torch from 2.11 (stable ABIs on both sides).
wheel: $(INSTALLED)
	$(BIN)/python -m build --no-isolation --outdir dist .

# torch comes first because the package builds against the one that is installed, not in isolation;
# pip before 23.1 would isolate an editable build all the same unless told to go by PEP 517.
$(INSTALLED): constraints.txt setup.py pyproject.toml layerzero/ops/schema.py $(wildcard csrc/*.cpp csrc/*.h csrc/*.inc csrc/cuda/*.cu csrc/cuda/*.h)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "layerzero needs Python 3.10 or newer, $(PYTHON) is " + sys.version)'
	@echo "Setting up $(VENV) (the first time, torch takes a minute or so to download)"
	$(PYTHON) -m venv $(VENV)
	sed '$(TORCH:%=s/^torch==.*/torch==%/)' constraints.txt > $(VENV)/constraints.txt
	$(PIP_INSTALL) torch setuptools
	$(PIP_INSTALL) --no-build-isolation --use-pep517 --editable '.[examples,dev]'
	@# On all cores, as pip does not; some packages come with files that are templates, not Python.
	@$(BIN)/python -m compileall -qq -j 0 -x '$(NOT_COMPILED)' $(VENV)/lib || true
	@$(BIN)/python -c 'import layerzero; s = layerzero.native_status(); s.native or print("layerzero runs plain torch, slower:", s.reason)'
	@touch $@

clean:
	rm -rf .venv .venv-torch-* $(DOCS_VENV) build dist layerzero/_C*.so *.egg-info .pytest_cache .mypy_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
