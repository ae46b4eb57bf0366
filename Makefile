# make demo   set everything up, then time a tiny pipeline at 5,376 tokens, unpatched and with each profile; two minutes
# make quick  what to run before every commit: checks and the fast tests, in under two minutes
# make test   set everything up and run the tests
# make check  lint, types, structure
# make studies  the tests of studies/, each study on small settings; minutes
# make gpu    the tests that use a GPU: run them first on a new card
# make kernels  compile every kernel for GPUs that are not there, after a change of one; minutes
# make engines  the plug-ins of ComfyUI, vLLM-Omni and others, each in an environment with its engine (gigabytes)
# make docs   the pages and the API reference, into build/site
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
JOBS ?= 2
# each process takes a run of whole files, whose fixtures are then made once, and helps the other at the end
PARALLEL = -n $(JOBS) --dist worksteal
# tests of the mathematics, of patching and of what has no model in it; make test runs all
QUICK := tests/attention/test_layout.py tests/attention/test_reference.py tests/attention/test_api.py \
	tests/attention/test_mixing.py tests/patching/test_layer.py tests/patching/test_route.py \
	tests/families/test_added_family.py tests/test_config.py

# Python keeps what it compiled of the packages, which else every process of a test would compile anew, for ten seconds
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo quick test check studies kernels gpu engines docs clean

# the oldest version that pyproject.toml allows: make kernels compiles with it too
OLDEST_TRITON := 3.6.0

# A machine with CUDA keeps the torch (and the triton that belongs to it) that it has; others get the pinned CPU one.
# --no-compile: Python compiles what is imported when it is; pip would compile thousands of files that never are.
$(VENV)/ready: pyproject.toml constraints.txt
	@if $(PYTHON) -c "import sys, torch; sys.exit(not torch.cuda.is_available())" 2>/dev/null; then \
		$(PYTHON) -m venv --system-site-packages $(VENV) && \
		grep -vE "^(torch|triton)==" constraints.txt > $(VENV)/constraints.txt; \
	else \
		$(PYTHON) -m venv $(VENV) && cp constraints.txt $(VENV)/constraints.txt && \
		$(BIN)/pip install --quiet --no-compile --disable-pip-version-check --root-user-action ignore --constraint $(VENV)/constraints.txt torch; \
	fi
	$(BIN)/pip install --quiet --no-compile --disable-pip-version-check --root-user-action ignore --constraint $(VENV)/constraints.txt --editable ".[dev]"
	touch $@

demo: $(VENV)/ready
	$(BIN)/mhla bench pipeline --model tiny-wan --set height=128 --set width=128 --set num_frames=21 --repetitions 1

$(VENV)/triton-oldest: $(VENV)/ready
	$(BIN)/pip install --quiet --no-compile --disable-pip-version-check --root-user-action ignore --no-deps --upgrade --target $@ triton==$(OLDEST_TRITON)

test: $(VENV)/ready
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(PARALLEL) --durations=25

studies: $(VENV)/ready
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest studies

quick: check
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(PARALLEL) -m "not slow and not gpu" $(QUICK)

check: $(VENV)/ready
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python .ci/check_structure.py

kernels: $(VENV)/triton-oldest
	$(BIN)/python -m tests.attention.triton.ahead_of_time write
	PYTHONPATH=$(VENV)/triton-oldest $(BIN)/python -m tests.attention.triton.ahead_of_time add MHLA

gpu: $(VENV)/ready
	$(BIN)/mhla check
	$(BIN)/python -m pytest -m gpu

# Each tests/engines/<engine>.txt makes an environment, and what <engine>.no-deps.txt names joins it without what that
# requires, such as packages for a GPU. Their diffusers may be older than ours, so this package comes without its own too.
ENGINE_NAMES := $(filter-out %.no-deps,$(basename $(notdir $(wildcard tests/engines/*.txt))))
ENGINE_PIP = $(@D)/bin/pip install --quiet --no-compile --disable-pip-version-check --root-user-action ignore
build/engines/%/ready: tests/engines/%.txt $(wildcard tests/engines/*.no-deps.txt) pyproject.toml
	$(PYTHON) -m venv $(@D)
	$(ENGINE_PIP) --requirement $<
	$(if $(wildcard tests/engines/$*.no-deps.txt),$(ENGINE_PIP) --no-deps --requirement tests/engines/$*.no-deps.txt)
	$(ENGINE_PIP) --no-deps --editable .
	touch $@

engines: $(ENGINE_NAMES:%=build/engines/%/ready)
	for engine in $(ENGINE_NAMES); do \
		echo "== $$engine" && OMP_NUM_THREADS=1 build/engines/$$engine/bin/python -m pytest tests/engines || exit 1; \
	done

docs: $(VENV)/ready
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

clean:
	rm -rf $(VENV) dist build outputs
