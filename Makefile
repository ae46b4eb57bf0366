# make demo   set everything up and compare softmax, linear attention and MHLA on a tiny trained pipeline
# make test   set everything up and run the tests
# make check  lint, types, import floors
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
JOBS ?= 2

.PHONY: demo test check clean

# A machine with CUDA keeps the torch (and the triton that belongs to it) that it has; others get the pinned CPU one.
# --no-compile: Python compiles what is imported when it is; pip would compile thousands of files that never are.
$(VENV)/ready: pyproject.toml constraints.txt
	@if $(PYTHON) -c "import sys, torch; sys.exit(not torch.cuda.is_available())" 2>/dev/null; then \
		$(PYTHON) -m venv --system-site-packages $(VENV) && \
		grep -vE "^(torch|triton)==" constraints.txt > $(VENV)/constraints.txt; \
	else \
		$(PYTHON) -m venv $(VENV) && cp constraints.txt $(VENV)/constraints.txt && \
		$(BIN)/pip install --quiet --no-compile --constraint $(VENV)/constraints.txt torch; \
	fi
	$(BIN)/pip install --quiet --no-compile --constraint $(VENV)/constraints.txt --editable ".[dev]"
	touch $@

demo: $(VENV)/ready
	$(BIN)/mhla demo

test: $(VENV)/ready
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS)

check: $(VENV)/ready
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

clean:
	rm -rf $(VENV) dist build outputs
