# Every target sets up what it needs and can be repeated.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

PY := .venv/bin/python
HEADRACE := .venv/bin/headrace
export Q ?= What is the capital of France?
MODEL ?= smollm2
# The interpreter of a GPU machine, used as it is; nothing is installed there.
GPU_PYTHON ?= python3
GPU_TESTS = $$(grep -rlE 'mark\.gpu' --include='test_*.py' tests)

.PHONY: help demo conformance chat test test-slow lint format gpu-test gpu-bench cpu-bench clean

help: ## show this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 14

demo: ## ask a real model: make demo Q='...'
	@scripts/setup_venv.sh demo
	@$(HEADRACE) generate $(MODEL) --chat --prompt="$$Q" --temperature 0 --max-tokens 256 --stats

chat: ## talk with a real model
	@scripts/setup_venv.sh demo
	@$(HEADRACE) chat $(MODEL)

# Dozens of processes start, so what Python compiled is kept, whatever the shell says.
test: ## all tests but slow and GPU ones, within 6 minutes on 2 cores
	@scripts/setup_venv.sh dev
	OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(PY) -m pytest -q -n 2 --dist worksteal

test-slow: ## the slow tests
	@scripts/setup_venv.sh dev
	$(PY) -m pytest -q -m 'slow and not gpu'

# Suites to run, by the names that `--help` of the script lists; all by default.
SUITES ?=

conformance: ## other people's tests against the server: make conformance SUITES='openai lm-eval' FLAGS=--fast
	@scripts/setup_venv.sh dev
	$(PY) tests/external/conformance.py $(SUITES) $(FLAGS)

lint: ## style, types, floors
	@scripts/setup_venv.sh dev
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	.venv/bin/lint-imports

format: ## mend the style
	@scripts/setup_venv.sh dev
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

# Processes that share the device: most of a test is the compiling of kernels, each on one core.
# Those that are done take tests of the others; kernels that one compiled the others read from disk.
GPU_TEST_WORKERS ?= 14

gpu-test: ## tests that need a CUDA device, within 6 minutes on 16 cores
	OMP_NUM_THREADS=1 PYTHONPATH="src$${PYTHONPATH:+:$$PYTHONPATH}" $(GPU_PYTHON) -m pytest -q -o addopts= \
		-m 'gpu and not slow' -n $(GPU_TEST_WORKERS) --dist worksteal --durations 20 $(GPU_TESTS)

# Where gpu-bench leaves its JSON lines, and the seconds one part of it may take.
OUT ?= build/bench
GPU_BENCH_LIMIT ?= 170
# Parts to run, by the names gpu-bench prints; all by default.
PARTS ?=
# Wheels that are not installed may be on PYTHONPATH already.
GPU_HEADRACE = PYTHONPATH="src$${PYTHONPATH:+:$$PYTHONPATH}" timeout $(GPU_BENCH_LIMIT) \
	$(GPU_PYTHON) -m headrace.cli.main

gpu-bench: ## every table of docs/performance.md on a CUDA device, within 8 minutes
	@mkdir -p "$(OUT)"; failed=""; \
	part() { \
		name=$$1; shift; \
		if [ -n "$(PARTS)" ] && [[ " $(PARTS) " != *" $$name "* ]]; then return; fi; \
		began=$$SECONDS; echo; echo "== $$name: headrace bench $$*"; \
		$(GPU_HEADRACE) bench "$$@" --device cuda --json 2>&1 >"$(OUT)/$$name.jsonl" || failed="$$failed $$name"; \
		echo "== $$name: $$((SECONDS - began)) s"; \
	}; \
	part ceilings ceilings; \
	part step-qwen3-8b step qwen3-8b --batch 1,32,128,256 --prefill 1,32 --mixed --capture all; \
	part step-qwen3-0.6b step qwen3-0.6b --batch 1,32,256 --prefill 1,32 --mixed --capture all; \
	part startup-qwen3-8b startup qwen3-8b; \
	part offline-qwen3-8b offline qwen3-8b --num-prompts 1000 --input-len 1024 --output-len 256 \
		--repeats 1 --no-enable-prefix-cache --capture all; \
	part step-llama-3.1-8b step llama-3.1-8b --batch 1,32,256 --prefill 1 --trace-turns 0 --repeats 2 \
		--capture all; \
	echo; echo "JSON lines: $(OUT)"; \
	if [ -n "$$failed" ]; then echo "failed:$$failed"; exit 1; fi

cpu-bench: ## against transformers on this CPU, float32 and bfloat16
	@scripts/setup_venv.sh bench
	for dtype in float32 bfloat16; do \
		$(HEADRACE) bench offline $(MODEL) --device cpu --dtype $$dtype --against transformers \
			--num-prompts 1,16 --input-len 128 --output-len 128 --first-token-len 512 $(FLAGS); \
	done

clean: ## remove the environment and caches
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
