# Two targets are all that a newcomer needs: make demo, make test.
# Needed on the machine: Linux, Python >= 3.11, Go >= 1.26, make, git.

SHELL := /bin/bash
.DEFAULT_GOAL := help
.PHONY: help setup venv controlplane clustertools demo test lint generate bench soak unit rollout house selectors kernels engine simulation cluster e2e clean

PYTHON ?= python3
SUITE ?=
ARGS ?=
# own: the cluster of KUBECONFIG. Taken from the command line only, never from the environment.
CLUSTER :=
ifneq ($(CLUSTER),)
export KVTIER_CLUSTER := $(CLUSTER)
endif
BIN := .venv/bin
PLANE := tests/cluster/kvtier_localplane
build_plane = chosen=$$($(PYTHON) $(PLANE)/choice.py) && \
  if [ "$$chosen" = local ]; then $(PYTHON) $(PLANE)/build.py $(1) >/dev/null; fi

help: ## this list
	@grep -hE '^[a-z0-9]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 16

demo: setup ## the whole idea on real parts, with a report (ARGS=--keep: stays up; CLUSTER=own: on $KUBECONFIG)
	@$(BIN)/python -m tests.e2e.demo $(ARGS)

test: setup clustertools ## lint and every suite
	@$(BIN)/python hack/suites.py

lint: venv ## style, types, import rules, generated files
	@hack/lint

unit: venv ## the unit suites, one a core
	@$(BIN)/python hack/suites.py unit-core unit

rollout: venv ## walks of rollouts, on an API server in memory
	@$(BIN)/python hack/suites.py $@

house: venv ## the house, the vocabulary and the plugin
	@$(BIN)/python hack/suites.py $@

selectors: venv ## selectors and their evaluation
	@$(BIN)/python hack/suites.py selectors eval

kernels: venv ## the kernels: in the interpreter and compiled, and on the CPU
	@$(BIN)/python hack/suites.py kernels kernels-cpu

engine: venv ## agents and clients, with a model and without
	@$(BIN)/python hack/suites.py engine-agents engine

simulation: venv ## the block store on one clock and one seed
	@$(BIN)/python hack/suites.py $@

cluster: clustertools ## both cluster suites, against real API servers
	@$(BIN)/python hack/suites.py cluster cluster-beside

e2e: setup ## the demo and its claims
	@$(BIN)/python hack/suites.py demo-own e2e

bench: setup ## SUITE=name writes build/bench/name.json; without SUITE lists the suites
	@$(BIN)/python -m tests.bench $(if $(SUITE),$(SUITE),--list) $(ARGS)

soak: venv ## a long run of the block store with faults; ARGS="--minutes 3", --simulation: seeds, --gates: rollouts
	@$(BIN)/python -m tests.soak $(ARGS)

generate: venv ## CRDs, API reference, chart copies, gRPC stubs
	@hack/generate

setup: ## what demo and test need: .venv and the control plane, made at the same time
	@$(PYTHON) $(PLANE)/choice.py >/dev/null
	@$(MAKE) --no-print-directory -j2 venv controlplane

venv: ## .venv from the pinned requirements; nothing when it is current
	@PYTHON=$(PYTHON) hack/venv

controlplane: ## etcd and kube-apiserver, built from source once per machine; none for an own cluster
	@$(call build_plane,plane)

clustertools: setup ## what the cluster suite needs besides: kube-controller-manager and helm
	@$(call build_plane,controllers)
	@$(PYTHON) $(PLANE)/build.py helm >/dev/null

clean: ## reports and caches of this checkout; not .venv, not the built control plane
	@rm -rf build .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
