# make demo   the whole road on the embedded target: prepare, train, eval, export (sets up .venv by itself)
# make test   every test (engine tests run when `make engine` has been run)
# make check  lint, format, types and the house rules, without the long tests
# make engine the serving engine's own environment in .venv-engine
PYTHON ?= python3
VENV ?= .venv
ENGINE_VENV ?= .venv-engine
WORKERS ?= 2
BIN := $(VENV)/bin
STAMP := $(VENV)/.stamp
ENGINE_STAMP := $(ENGINE_VENV)/.stamp
ARGS ?=

# One thread a worker: two workers with two threads each would fight over two cores.
TEST_ENV = OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false
ifneq ($(wildcard $(ENGINE_STAMP)),)
TEST_ENV += HEADSTART_ENGINE_PYTHON=$(or $(HEADSTART_ENGINE_PYTHON),$(abspath $(ENGINE_VENV)/bin/python))
endif

.PHONY: demo test check engine install format clean

demo: $(STAMP)
	$(BIN)/headstart demo $(ARGS)

test: $(STAMP)
	$(TEST_ENV) $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile $(ARGS)

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(TEST_ENV) $(BIN)/python -m pytest -q tests/unit/test_imports.py tests/unit/test_house.py tests/unit/test_config.py $(ARGS)

format: $(STAMP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

install: $(STAMP)

$(STAMP): requirements.lock pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(None if sys.version_info >= (3, 11) else "headstart needs Python 3.11 or newer")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install "$$(grep '^torch==' requirements.lock)"
	$(BIN)/python -m pip install --no-deps -r requirements.lock
	$(BIN)/python -m pip install --no-deps --no-build-isolation -e .
	touch $@

engine: $(ENGINE_STAMP)

$(ENGINE_STAMP): requirements-engine.lock
	test -x $(ENGINE_VENV)/bin/python || $(PYTHON) -m venv $(ENGINE_VENV)
	$(ENGINE_VENV)/bin/python -m pip install "$$(grep '^torch==' requirements-engine.lock)"
	$(ENGINE_VENV)/bin/python -m pip install --no-deps -r requirements-engine.lock
	touch $@

clean:
	rm -rf $(VENV) $(ENGINE_VENV) outputs multirun dist build .pytest_cache .mypy_cache .ruff_cache
