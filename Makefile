# One command per habit; each sets up what it needs. `make help` lists them.
VENV := .venv
BIN := $(VENV)/bin
SETUP := $(VENV)/.installed
RELEASE := .venv-release
RELEASE_TOOLS := build==1.6.1 twine==7.0.0 check-jsonschema==0.39.0
TRIAL := CUDA_VISIBLE_DEVICES= LOCKSTEP_GPU_TESTS=cpu $(BIN)/python -m pytest tests/gpu -n auto --maxprocesses 8 --dist loadfile

.DEFAULT_GOAL := help
.PHONY: help setup demo demo-detection test test-slow test-quick test-gpu test-gpu-trial test-oldest test-newest test-one-worker check docs docs-publish bench dist release-check rehearse clean

help: ## list the commands
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  make \1\t/' | expand -t 20

$(SETUP): pyproject.toml constraints.txt scripts/setup
	scripts/setup $(VENV) -c constraints.txt

setup: $(SETUP) ## make or renew .venv with everything that is needed

demo: $(SETUP) ## train the reference MNIST net on two towers, with progress on screen
	$(BIN)/lockstep train mnist --workdir runs/mnist

demo-detection: $(SETUP) ## train a small detector of blood cells on two towers
	$(BIN)/lockstep train bccd --workdir runs/bccd

test: $(SETUP) ## run the quick half of the laws, one test more at once than there are cores: many wait for processes
	$(BIN)/python -m pytest -n $$(($$(nproc) + 1)) --maxprocesses 8 --dist loadfile

test-slow: $(SETUP) ## run the slow half of the laws: before a release, and after changes to what it covers
	$(BIN)/python -m pytest -m slow -n $$(($$(nproc) + 1)) --maxprocesses 8 --dist loadfile
	$(TRIAL) -m "gpu and slow"

test-quick: $(SETUP) ## run the tests that start no process and train for no seconds
	$(BIN)/python -m pytest -m "not slow and not process" -n auto --maxprocesses 8 --dist loadfile

test-gpu: $(SETUP) ## run the tests that need a GPU, one after another
	$(BIN)/python -m pytest -m gpu

test-gpu-trial: $(SETUP) ## run the tests for a GPU on the CPU, whose tensors are then treated as a GPU's
	$(TRIAL) -m "gpu and not slow"

test-oldest: ## run the tests on the oldest versions that are supported, in a virtual environment of its own
	mkdir -p build
	sed -n '/^dependencies/,/^dev = /p' pyproject.toml | grep -v '^docs = ' | grep -oE '[A-Za-z0-9_-]+>=[0-9.]+' | sed 's/>=/==/' > build/oldest.txt
	scripts/setup .venv-oldest -c build/oldest.txt
	.venv-oldest/bin/python -m pytest -n auto --maxprocesses 8 --dist loadfile

test-newest: ## run the tests on the newest versions there are, in a virtual environment of its own
	scripts/setup .venv-newest --upgrade
	.venv-newest/bin/python -m pytest -n auto --maxprocesses 8 --dist loadfile

test-one-worker: $(SETUP) ## train, resume and report with one worker, as on macOS
	$(BIN)/python -m pytest -m "" tests/test_systems.py

check: $(SETUP) ## formatting, lint, types, spelling
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/codespell

docs: $(SETUP) ## build the documentation site in build/docs; a warning, a lost link or a public name without a docstring fails
	$(BIN)/sphinx-build --quiet --fail-on-warning --keep-going -c docs . build/docs

docs-publish: docs ## put the site into the folder SITE: that of this version if the commit has its tag, else latest, beside the others
	scripts/publish_docs "$(SITE)"

bench: $(SETUP) ## measure a step, its update and a save against PyTorch by hand
	$(BIN)/python benchmarks/parity_step.py
	$(BIN)/python benchmarks/update.py
	$(BIN)/python benchmarks/checkpoint.py

$(RELEASE)/.installed: Makefile
	python3 -m venv $(RELEASE)
	$(RELEASE)/bin/pip install --quiet --disable-pip-version-check $(RELEASE_TOOLS)
	touch $@

dist: $(RELEASE)/.installed ## build the source distribution and the wheel in dist; LOCKSTEP_REPOSITORY is the address that links lead to
	rm -f dist/lockstep_train-*
	$(RELEASE)/bin/python -m build

release-check: dist ## what has to hold before a release: versions, files, and that the wheel trains where it is installed
	scripts/release_check --tools $(RELEASE)/bin --torch "$$(grep ^torch== constraints.txt)"

rehearse: dist ## type the tutorials into empty folders with the wheel installed, and compare what comes; screens and pictures are in build/rehearsal
	scripts/rehearse --wheel dist/lockstep_train-*.whl --torch "$$(grep ^torch== constraints.txt)" $(REHEARSE)

clean: ## remove the virtual environments, the site and the rehearsal (runs and data stay)
	rm -rf .venv .venv-oldest .venv-newest $(RELEASE) build/docs build/rehearsal docs/generated
