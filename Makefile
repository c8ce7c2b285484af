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
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / {printf "  %-18s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

## Development

.PHONY: venv
venv: .venv/.synced ## The Python environment in .venv, exactly as pinned
.venv/.synced: requirements/dev.txt pyproject.toml
	[[ -x .venv/bin/python ]] || $(UV) venv --quiet .venv
	$(UV) pip sync --quiet --python .venv/bin/python --require-hashes requirements/dev.txt
	$(UV) pip install --quiet --python .venv/bin/python --no-deps --editable .
	touch $@

.PHONY: lock
lock: ## Pins what pyproject.toml asks for in requirements/
	$(COMPILE) --extra operator --output-file requirements/operator.txt pyproject.toml
	$(COMPILE) --extra trainer --output-file requirements/trainer.txt pyproject.toml
	$(COMPILE) --all-extras --output-file requirements/dev.txt pyproject.toml

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

.PHONY: test
test: ## Everything: lint, types, imports, unit, layouts; then the cluster, and component, e2e and chaos tests on it
	.ci/stages venv lint typecheck imports test-unit test-layouts-short cluster-up images data test-component test-e2e test-chaos

.PHONY: test-unit
test-unit: venv ## Tests without a cluster
	pytest -n 2 tests/unit

.PHONY: test-layouts
test-layouts: venv ## Every data x tensor x pipeline layout of 4 and of 8 ranks: equal losses, any checkpoint into any other
	pytest tests/layouts

.PHONY: test-layouts-short
test-layouts-short: venv ## The same for 4 ranks only
	pytest tests/layouts -m "not slow"

.PHONY: test-component
test-component: venv ## Tests of one part against a real API server or real ranks (needs cluster-up and images)
	pytest tests/component

.PHONY: test-e2e
test-e2e: venv ## Whole training jobs on the cluster (needs cluster-up and images)
	pytest tests/e2e

.PHONY: test-chaos
test-chaos: venv ## Training jobs while pods, nodes and the operator are killed (needs cluster-up and images)
	pytest tests/chaos

.PHONY: bench
bench: venv ## Measures one decision by the number of pods, how right the cost models are, how fast the planner is, and what compression gains
	python bench/control_loop.py
	python bench/accuracy.py
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
bench-overhead: venv ## Measures the trainer's steps against a bare DDP loop's, and the stall of a background save
	python bench/overhead.py

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
