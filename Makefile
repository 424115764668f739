# make demo | bench | test | test-long | test-nightly | nightly | test-torch | test-newest | faults | soak | check | docs |
# docs-site | overlap | gpu:
# each sets up what it needs.

VENV ?= .venv
PYTHON ?= python3
ARGS ?=

# Commands and ranks of tests are processes by the hundred, which would each compile the sources again. Those of packages
# are compiled when they are first imported, not by pip, which compiles all of them.
unexport PYTHONDONTWRITEBYTECODE

BIN := $(VENV)/bin
READY := $(VENV)/.shardweave-ready

# The environment holds an editable install: one that names another clone would test that clone.
ifneq ($(shell cat "$(READY)" 2>/dev/null),$(CURDIR))
.PHONY: $(READY)
endif

.PHONY: demo bench test test-long test-nightly nightly test-torch test-newest faults soak check docs docs-site overlap gpu
.DEFAULT_GOAL := test

demo: $(READY)
	"$(BIN)/python" -m shardweave demo $(ARGS)

# The suites, quickly; prints tables. `pytest bench/ --scale quick --benchmark-json FILE` keeps the rounds to compare.
bench: $(READY)
	"$(BIN)/python" -m shardweave bench --quick $(ARGS)

# Files of tests are shared out to so many processes; most tests start processes of their own as well, and some wait.
# They come in the order of conftest.py: what takes long first.
WORKERS ?= 3
test: $(READY)
	"$(BIN)/pytest" -n $(WORKERS) --dist loadfile --no-loadscope-reorder -m "not long" $(ARGS)

# Ten times as many random requests against the oracle as test-long has.
test-nightly: $(READY)
	SHARDWEAVE_TEST_PARTS=100 TORCHINDUCTOR_VEC_ISA_OK=1 "$(BIN)/pytest" -m long $(ARGS)

# Inductor makes vector code there; scalar code, which compiles faster, in `make test`.
test-long: $(READY)
	TORCHINDUCTOR_VEC_ISA_OK=1 "$(BIN)/pytest" -m long $(ARGS)

# Every test that this machine can run, and those of the runtime on the newest torch.
nightly: test test-nightly
	$(MAKE) test-torch TORCH=$(NEWEST) NUMPY=numpy TORCH_TESTS="tests/runtime $(TOKEN_KERNELS)"

# The drop-in replaces names of torch's own, which differ between its versions: the runtime's tests on another one, in an
# environment of its own. Builds for GPUs are gigabytes. The interpreter of triton 3.6, which comes with torch 2.11, fails
# on numpy 2.4, in any loop over a number that is no constant.
TORCH ?= 2.11.0
NUMPY ?= numpy<2.4
TORCH_VENV ?= .venv-torch-$(TORCH)
TORCH_TESTS ?= tests/runtime
TORCH_READY := $(TORCH_VENV)/.shardweave-ready
ifneq ($(shell cat "$(TORCH_READY)" 2>/dev/null),$(CURDIR))
.PHONY: $(TORCH_READY)
endif
test-torch: $(TORCH_READY)
	"$(TORCH_VENV)/bin/pytest" -n $(WORKERS) --dist loadfile --no-loadscope-reorder -m "not long" $(TORCH_TESTS) $(ARGS)

$(TORCH_READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv "$(TORCH_VENV)"
	sed -E '/^(numpy|torch|triton)==/d' constraints.txt > "$(TORCH_VENV)/constraints.txt"
	"$(TORCH_VENV)/bin/python" -m pip install --quiet --disable-pip-version-check --no-compile \
	    "torch==$(TORCH)" "$(NUMPY)" --editable ".[dev]" -c "$(TORCH_VENV)/constraints.txt"
	"$(TORCH_VENV)/bin/python" -c "import shardweave.bench.harness.ranks"  # compiles what each process imports
	@printf '%s' "$(CURDIR)" > "$@"

# On the newest release that is supported, what depends on torch's and triton's internals, on shared memory: install(),
# redistribution, FSDP2, checkpoints, costs, dispatch modes, torch.compile, spmd_types, TokenSwitch, kernels compiled
# ahead of time, their launches, loops for CPUs, and gloo's threads. `make test-torch` runs the rest, and other
# transports. Of the kernels of tokens each is compiled as it is launched.
NEWEST ?= $(shell sed -n 's/^torch==//p' requirements-newest.txt)
NEWEST_WORKERS ?= 1
DTENSOR_ON_NEWEST := drop_in redistribute fsdp checkpoint checkpointable_tensor sharding_costs dispatch_modes \
    shard_to_partial
TOKEN_KERNELS := tests/kernels/test_token_kernels_aot.py
LAUNCHED := test_launched_token_kernels_are_vectorised
ON_NEWEST := $(DTENSOR_ON_NEWEST:%=tests/runtime/dtensor/test_%.py) tests/runtime/test_torch_private_names.py \
    tests/runtime/test_flight_recorder.py tests/runtime/moe/test_compile.py \
    tests/runtime/integrations/test_spmd_types.py tests/runtime/integrations/test_token_switch*.py \
    tests/runtime/integrations/test_torchtitan_*.py tests/kernels/test_aot.py $(TOKEN_KERNELS)::$(LAUNCHED) \
    tests/kernels/test_triton_launcher.py tests/kernels/test_compiled_loops.py tests/kernels/test_token_loops.py \
    tests/cli/test_doctor.py
test-newest:
	$(MAKE) test-torch TORCH=$(NEWEST) NUMPY=numpy TORCH_TESTS="$(ON_NEWEST)" WORKERS=$(NEWEST_WORKERS) \
	    ARGS='-k "not process_group and not hierarchical" $(ARGS)'

# A rank dies, stops, raises or exits at each of many points; and many random calls, with memory watched. They take so long
# at most, and print tables.
SECONDS ?= 600
faults soak: $(READY)
	"$(BIN)/python" -m shardweave.bench.reliability.$@ --seconds $(SECONDS) $(ARGS)

# mypy does not follow an editable install, and the clone's folder may have any name: it gets a link with the right one.
check: $(READY)
	"$(BIN)/ruff" check .
	"$(BIN)/ruff" format --check .
	links=$$(mktemp -d) && trap 'rm -rf "$$links"' EXIT && ln -s "$(CURDIR)" "$$links/shardweave" && \
	    MYPYPATH="$$links" "$(BIN)/mypy" -p shardweave
	"$(BIN)/lint-imports"
	site=$$(mktemp -d) && trap 'rm -rf "$$site"' EXIT && $(SPHINX) . "$$site"

# docs/api from the docstrings, and docs/pictures: the tests check that they are up to date.
docs: $(READY)
	"$(BIN)/python" docs/api_reference.py
	"$(BIN)/python" docs/pictures.py

# docs/pictures/overlap.svg, a profile of two microbatches on two hosts. For an idle machine; it takes a minute.
overlap: $(READY)
	"$(BIN)/python" docs/overlap.py

# The site, in site/. Dead links and headings, missing pictures and pages without a place in the sidebar are errors.
SPHINX = "$(BIN)/sphinx-build" --quiet --fail-on-warning --keep-going --conf-dir docs
docs-site: $(READY)
	trees=$$(mktemp -d) && trap 'rm -rf "$$trees"' EXIT && $(SPHINX) --doctree-dir "$$trees" . site

# For a machine with a GPU and no network: the python on PATH has torch, triton, numpy and pytest; nothing is installed.
# Tests and measurements in sections, 8 minutes at most; the report is in $OUT, or in .gpu. `make gpu ARGS=--dry`
# needs no GPU. docs/gpu.md has the rest.
gpu:
	links=$$(mktemp -d) && trap 'rm -rf "$$links"' EXIT && ln -s "$(CURDIR)" "$$links/shardweave" && \
	PYTHONPATH="$$links" $(PYTHON) -m shardweave.bench.gpu.run_sections --out "$${OUT:-.gpu}" $(ARGS)

$(READY): pyproject.toml constraints.txt
	@echo "setting up $(VENV) (torch is downloaded once, if pip has not got it)"
	$(PYTHON) -m venv "$(VENV)"
	"$(BIN)/python" -m pip install --quiet --disable-pip-version-check --no-compile \
	    torch==2.13.0 --editable ".[dev]" -c constraints.txt
	"$(BIN)/python" -c "import shardweave.bench.harness.ranks"
	@printf '%s' "$(CURDIR)" > "$@"
