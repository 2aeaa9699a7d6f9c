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

.PHONY: help demo chat test test-slow lint format gpu-test gpu-bench cpu-bench clean

help: ## show this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 14

demo: ## ask a real model: make demo Q='...'
	@scripts/setup_venv.sh demo
	@$(HEADRACE) generate $(MODEL) --chat --prompt="$$Q" --temperature 0 --max-tokens 256 --stats

chat: ## talk with a real model
	@scripts/setup_venv.sh demo
	@$(HEADRACE) chat $(MODEL)

test: ## all tests but slow and GPU ones, within 6 minutes on 2 cores
	@scripts/setup_venv.sh dev
	OMP_NUM_THREADS=1 $(PY) -m pytest -q -n 2 --dist worksteal

test-slow: ## the slow tests
	@scripts/setup_venv.sh dev
	$(PY) -m pytest -q -m 'slow and not gpu'

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

gpu-test: ## tests that need a CUDA device
	PYTHONPATH=src $(GPU_PYTHON) -m pytest -q -o addopts= -m gpu $(GPU_TESTS)

gpu-bench: ## offline benchmark on a CUDA device: make gpu-bench MODEL=... FLAGS='...'
	PYTHONPATH=src $(GPU_PYTHON) -m headrace.cli.main bench offline $(MODEL) --device cuda \
		--num-prompts 1,32,256 --input-len 1024 --output-len 128 --first-token-len 1024 $(FLAGS)

cpu-bench: ## against transformers on this CPU, float32 and bfloat16
	@scripts/setup_venv.sh bench
	for dtype in float32 bfloat16; do \
		$(HEADRACE) bench offline $(MODEL) --device cpu --dtype $$dtype --against transformers \
			--num-prompts 1,16 --input-len 128 --output-len 128 --first-token-len 512 $(FLAGS); \
	done

clean: ## remove the environment and caches
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
