# On a fresh machine with Python, pip and make: `make demo` and `make test`; `make docs` builds the site into site/.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: demo test lint docs diagrams setup bench clean

setup: $(STAMP)

# torch comes first and pinned, so that no other package can pull in another build of it.
$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(INSTALL) torch
	$(INSTALL) -e ".[dev]"
	touch $(STAMP)

demo: $(STAMP)
	$(BIN)/python examples/demo.py runs/demo

test: lint $(VENV)/.triton $(VENV)/.ray $(VENV)/.integrations
	$(BIN)/python -m pytest --numprocesses 3 --dist worksteal

# Triton's interpreter runs the GPU kernels in tests, and Ray a bench; where one cannot be had, its tests are skipped,
# which pytest says. A torch for CUDA has installed the one Triton that it accepts, a torch for CPUs has none.
$(VENV)/.triton: $(STAMP)
	-$(BIN)/python -c "import triton" 2>/dev/null || $(INSTALL) triton==3.9.0 -e ".[kernels]"
	touch $@

$(VENV)/.ray: $(STAMP)
	-$(INSTALL) -e ".[ray]"
	touch $@

# About 780 MB: tensorboard 54, wandb 75, lightning 36, accelerate 20, transformers 150, datasets 180, timm, torchvision and
# Trackio 130, MLflow 140. mlflow-skinny is MLflow without its server and pages; with the two other packages it has
# databases, which the tests write to.
$(VENV)/.integrations: $(STAMP)
	-$(INSTALL) -e ".[integrations]"
	touch $@

lint: $(STAMP)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

# A broken link, a missing anchor or a name without documentation ends the build.
docs: $(VENV)/.docs
	$(BIN)/zensical build --clean --strict

$(VENV)/.docs: $(STAMP)
	$(INSTALL) -e ".[docs]"
	touch $@

# The diagrams of docs/architecture.md, by node and a Chromium; the pictures are committed.
diagrams: $(STAMP)
	$(BIN)/python docs/render_diagrams.py

bench: $(STAMP)
	$(BIN)/python bench/peers.py

clean:
	rm -rf $(VENV) site .cache .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist src/*.egg-info
