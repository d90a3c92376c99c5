# Every target makes .venv first if it is missing or older than what it was made from.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed

# One thread per process: the stages are the parallelism. Nothing here downloads a model.
export OMP_NUM_THREADS := 1
export HF_HUB_OFFLINE := 1
export TOKENIZERS_PARALLELISM := false

.PHONY: help venv demo test test-all lint type format docs bench bench-planner bench-templates bench-sim bench-frozen bench-axes bench-entrain \
	bench-balance bench-step bench-ahead bench-chain bench-recovery bench-commit bench-attention bench-compile bench-cp bench-gpu bench-cli \
	bench-stream coverage clean
.DEFAULT_GOAL := help

help:  ## list the targets
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

venv: $(STAMP)  ## make .venv with everything tests, demo and benchmarks need

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --no-compile -c constraints.txt -e '.[dev]'
	touch $@

demo: $(STAMP)  ## train a small LLaVA on scanned digits in a pipeline of local processes; writes demo_out/
	$(BIN)/python -P examples/digits_llava.py --out demo_out

# Two files of tests at a time; tests of one file stay together, and share what they set up.
PYTEST := $(BIN)/pytest -q -n 2 --dist loadfile

test: $(STAMP)  ## the tests that take minutes
	$(PYTEST)

test-all: $(STAMP)  ## the slow tests as well
	$(PYTEST) -m "not gpu"

lint: $(STAMP)  ## ruff: rules and format; docstrings
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python -P tests/structure/prose.py

format: $(STAMP)  ## ruff: rewrite
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

type: $(STAMP)  ## pyright: the product strictly, then tests and the rest
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/pyright --pythonpath $(BIN)/python -p tests

docs: $(STAMP)  ## build the documentation into site/, without network; rewrites docs/cli.md; warnings and broken links fail
	$(BIN)/python -P docs/tools/cli_page.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

bench: $(STAMP)  ## capture and plan real-size models (7B to 84B) from their configs: seconds and memory
	$(BIN)/python -P benchmarks/real_size.py

bench-cli: $(STAMP)  ## processor seconds of commands that look at no model; fails above 1.0
	$(BIN)/python -P benchmarks/cli_start.py

bench-planner: $(STAMP)  ## seconds of the interval DP and of proofs by Z3, actions/s of the simulator
	$(BIN)/python -P benchmarks/partition.py
	$(BIN)/python -P benchmarks/simulator.py

bench-templates: $(STAMP)  ## seconds to plan a pipeline template, beside the 36 published ones; fails below 100x (1,000x)
	$(BIN)/python -P benchmarks/templates.py

bench-sim: $(STAMP)  ## predicted against measured step time of two-process pipelines; fails above a median error of 10%
	$(BIN)/python -P benchmarks/sim.py

bench-frozen: $(STAMP)  ## nine frozen MLLMs on 24 x A40, simulated: ours against frozen-unaware, Megatron-like and FSDP-like
	$(BIN)/python -P benchmarks/frozen_aware.py

bench-axes: $(STAMP)  ## which axes (tp, cp, pp, dp, fsdp) each component of 15 published models gets and why, simulated
	$(BIN)/python -P benchmarks/axes.py

bench-entrain: $(STAMP)  ## how stable is a stage allocation over batches of a dataset?
	$(BIN)/python -P benchmarks/entrain_allocation.py

bench-balance: $(STAMP)  ## balancing of samples over replicas and microbatches: milliseconds and distance to the optimum
	$(BIN)/python -P benchmarks/balance.py

bench-step: $(STAMP)  ## whole steps simulated on the settings of Entrain, OrchMLLM and DFLOP, beside their figures
	$(BIN)/python -P benchmarks/step_entrain.py
	$(BIN)/python -P benchmarks/step_orchmllm.py
	$(BIN)/python -P benchmarks/step_dflop.py

bench-ahead: $(STAMP)  ## steps of 100 ms with planning made 30 ms slower; fails if they are more than 3% longer
	$(BIN)/python -P benchmarks/ahead.py

bench-chain: $(STAMP)  ## a text-only chain against torch's Schedule1F1B; fails below a ratio of 1.0
	$(BIN)/python -P benchmarks/chain.py

bench-recovery: $(STAMP)  ## 30 kills of workers of an elastic run, beside restarts; fails above 0.3 s, 2 s at worst, below 20x
	$(BIN)/python -P benchmarks/recovery.py

bench-commit: $(STAMP)  ## elastic steps of 100 ms or more with and without the coordinator; fails above 1.05
	$(BIN)/python -P benchmarks/commit_cost.py

bench-attention: $(STAMP)  ## bitfield attention against dense-mask attention on this CPU: time and memory; fails below 3x
	$(BIN)/python -P benchmarks/cpu_attention.py

bench-compile: $(STAMP)  ## seconds to compile 4 and 32 layers, anew and from the cache; fails above a ratio of 1.5 (cache: a third)
	$(BIN)/python -P benchmarks/compile_time.py

bench-cp: $(STAMP)  ## balance of all ways to give token blocks to ranks; fails above 1.005 for ours
	$(BIN)/python -P benchmarks/cp_balance.py

bench-gpu: $(STAMP)  ## bitfield attention against flex_attention and SDPA; needs a CUDA device
	$(BIN)/python -P benchmarks/gpu_attention.py

bench-stream: $(STAMP)  ## 200 microbatches of free sizes from the processors of 23 families: captures, replays, eager's losses, throughput
	$(BIN)/python -P benchmarks/stream.py

coverage: $(STAMP)  ## capture every family and rewrite docs/coverage.md
	$(BIN)/python -P benchmarks/coverage.py --out docs/coverage.md

clean:  ## remove .venv and everything written by the targets
	rm -rf .venv demo_out site build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
