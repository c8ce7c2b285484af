# `make help` lists what there is. The logic lies in cluster/ and .ci/; everything is safe to run again.

SHELL := bash
.SHELLFLAGS := -o errexit -o nounset -o pipefail -c
MAKEFLAGS += --no-builtin-rules
.DEFAULT_GOAL := help

export KUBECONFIG := $(shell cluster/cluster kubeconfig)
export PATH := $(CURDIR)/.venv/bin:$(shell cluster/cluster bin):$(PATH)
export UV_PYTHON_DOWNLOADS := never

UV := requirements/uv
CLUSTER := cluster/cluster
CRD := costaware.dev_costawaretrainingjobs.yaml
CHART_CRDS := charts/cost-aware-training-operator/files/crds
COMPILE := $(UV) pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-emit-index-url --no-annotate --no-header

.PHONY: help
help: ## Lists these targets
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / {printf "  %-20s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

## Development

# Compiled once here: where PYTHONDONTWRITEBYTECODE is set, every rank of every test would compile PyTorch again, 5 s each.
.PHONY: venv
venv: .venv/.synced ## The Python environment in .venv, exactly as pinned
.venv/.synced: requirements/dev.txt pyproject.toml
	[[ -x .venv/bin/python ]] || $(UV) venv --quiet .venv
	$(UV) pip sync --quiet --compile-bytecode --python .venv/bin/python --require-hashes requirements/dev.txt
	$(UV) pip install --quiet --python .venv/bin/python --no-deps --editable .
	touch $@

.PHONY: lock
lock: ## Pins what pyproject.toml asks for in requirements/
	$(COMPILE) --extra operator --output-file requirements/operator.txt pyproject.toml
	$(COMPILE) --extra trainer --output-file requirements/trainer.txt pyproject.toml
	$(COMPILE) --all-extras --output-file requirements/dev.txt pyproject.toml

.PHONY: check
check: venv ## Style, types and imports, in under a minute
	.ci/stages lint typecheck imports

.PHONY: lint
lint: venv ## Style and common mistakes (ruff)
	ruff check
	ruff format --check

.PHONY: typecheck
typecheck: venv ## Types (mypy, strict)
	mypy

.PHONY: imports
imports: venv ## Which part may import which (import-linter)
	lint-imports

.PHONY: crds
crds: venv ## Generates the CustomResourceDefinition from the models, the chart's copy and the reference
	mkdir -p crds
	python -m cost_aware_operator.api.crd >crds/.$(CRD)
	mv crds/.$(CRD) crds/$(CRD)
	$(MAKE) --no-print-directory chart-crds
	python docs/generate.py

.PHONY: chart-crds
chart-crds: ## Copies the CustomResourceDefinition into the chart
	mkdir -p $(CHART_CRDS)
	cp crds/$(CRD) $(CHART_CRDS)/$(CRD)

## Tests

# Tests that measure seconds are marked `alone` and run one at a time, the others on two cores.
PYTEST := pytest --durations=20
BESIDE := -n 2 --dist worksteal

.PHONY: test
test: ## All tests that need neither Docker nor root: units, recorded cases, real ranks over gloo
	.ci/stages venv test-beside test-alone

.PHONY: test-beside
test-beside: venv ## Those of `make test` that may run beside each other
	$(PYTEST) $(BESIDE) -m "not cluster and not exhaustive and not alone" tests

.PHONY: test-alone
test-alone: venv ## Those of `make test` that measure seconds, one at a time
	$(PYTEST) -m "alone and not cluster and not exhaustive" tests

.PHONY: test-unit
test-unit: venv ## Units only
	$(PYTEST) $(BESIDE) tests/unit

.PHONY: test-layouts
test-layouts: venv ## Every data x tensor x pipeline layout of 4 and of 8 ranks: equal losses, any checkpoint into any other
	$(PYTEST) tests/layouts

.PHONY: test-exhaustive
test-exhaustive: venv ## What `make test` leaves out: all layouts of 4 and of 8 ranks
	$(PYTEST) -m "exhaustive and not cluster" tests

COMMIT ?= $(shell git rev-parse HEAD)

.PHONY: test-twentieth
test-twentieth: venv ## One twentieth of `make test-exhaustive`, chosen by the commit
	$(PYTEST) -m "exhaustive and not cluster" --twentieth=$(COMMIT) tests

.PHONY: test-cluster
test-cluster: ## All tests that need a real cluster, which this brings up
	.ci/stages venv cluster-up images data test-cluster-beside test-cluster-alone test-cluster-rotating

.PHONY: test-on-cluster
test-on-cluster: ## The same on the cluster, images and data that are there
	.ci/stages venv test-cluster-beside test-cluster-alone test-cluster-rotating

# Jobs that only wait run beside each other, file by file: what a file's tests share is made once.
.PHONY: test-cluster-beside
test-cluster-beside: venv ## Those of `make test-cluster` that do not disturb each other
	$(PYTEST) -n 2 --dist loadscope -m "not alone" tests/cluster tests/unit/repository/test_chart.py

.PHONY: test-cluster-alone
test-cluster-alone: venv ## Those that measure, or take nodes, the operator or the control plane away, one at a time
	$(PYTEST) -m "alone and not exhaustive" tests/cluster

.PHONY: test-cluster-rotating
test-cluster-rotating: venv ## One of the cluster's tests that are relatives of others and take minutes, chosen by the commit
	$(PYTEST) -m "alone and exhaustive" --one-of=$(COMMIT) tests/cluster

.PHONY: test-cluster-exhaustive
test-cluster-exhaustive: venv ## All of them
	$(PYTEST) -m "alone and exhaustive" tests/cluster

.PHONY: test-all
test-all: ## Everything: `make check`, `make test`, all layouts, `make test-cluster`
	.ci/stages check test test-exhaustive test-cluster test-cluster-exhaustive

.PHONY: bench
bench: venv ## Measures one decision by the number of pods, how right the cost models are, how fast the planner is, and what compression gains
	python bench/control_loop.py
	python -m bench.accuracy
	python bench/planner.py
	python bench/compression.py

.PHONY: savings
savings: venv ## The same runs with and without the adjuster, on the cluster: what it saves (needs install)
	python bench/savings.py

.PHONY: bench-reconfigure
bench-reconfigure: venv ## Measures changes of degrees in process, by forking, in new pods and in new processes, five of each
	python bench/reconfigure.py

.PHONY: bench-recreate
bench-recreate: venv ## Measures the same by pods that are deleted and made anew, on the development cluster
	python bench/recreate.py

.PHONY: bench-overhead
bench-overhead: venv ## Measures the trainer's and a session's steps against a bare DDP loop's, and the stall of a background save
	python bench/overhead.py
	python -m bench.session

.PHONY: gpu-check
gpu-check: venv ## Checks what only a GPU can show, on a machine with one or more, and writes bench/results/gpu-check.json
	python -m bench.gpu_check --out bench/results/gpu-check.json

## The cluster

.PHONY: cluster-up
cluster-up: ## Three Kubernetes nodes on this machine, with kind
	$(CLUSTER) up

.PHONY: cluster-down
cluster-down: ## Deletes them
	$(CLUSTER) down

.PHONY: cluster-check
cluster-check: ## Proves that pods on them import torch and all-reduce
	$(CLUSTER) check

.PHONY: kubeconfig
kubeconfig: ## Prints the path of the cluster's kubeconfig
	@echo $(KUBECONFIG)

.PHONY: images
images: ## Builds the operator's and the trainer's image and loads them into the nodes
	$(CLUSTER) torch
	$(CLUSTER) images

.PHONY: trainer-image
trainer-image: ## Builds the trainer image with PyTorch in it (5 GB) and runs two ranks in it
	$(CLUSTER) trainer-image

.PHONY: data
data: venv ## Prepares the data set of the examples
	python -m cost_aware_trainer.data prepare --output "$$($(CLUSTER) folder data)/python-stdlib"

.PHONY: install
install: ## Installs or upgrades the operator on the cluster
	$(CLUSTER) install

.PHONY: uninstall
uninstall: ## Removes the operator from the cluster
	$(CLUSTER) uninstall

.PHONY: demo
demo: ## From nothing to a finished training job on the cluster, watched
	.ci/stages venv cluster-up images data install demo-run

.PHONY: demo-run
demo-run: venv ## Runs the example job on the cluster and watches it (needs install)
	$(CLUSTER) demo

.PHONY: clean
clean: ## Removes caches and build output; the cluster and .venv stay
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find operator trainer_image tests -name __pycache__ -type d -prune -exec rm -rf {} +
