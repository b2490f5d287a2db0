# Two commands need nothing but Python 3.11+, pip and make: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
TEST := OMP_NUM_THREADS=1 $(BIN)/pytest --numprocesses 2 --dist loadfile

.PHONY: demo test long check clean

demo: $(VENV)/.runtime
	$(BIN)/gatelab demo

test: $(VENV)/.development check
	$(TEST) -m "not long and not network and not peer and not gpu"
	$(TEST) --jaxtyping-packages=gatelab.gates,gatelab.model,gatelab.diagnose,gatelab.train,beartype.beartype -m "not compile and not network and not peer and not gpu and not slow and not long" tests/gates tests/model tests/diagnose tests/train

long: $(VENV)/.development
	$(TEST) -m long

check: $(VENV)/.development
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/lint-imports

$(VENV)/.runtime: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit("GateLab needs Python 3.11 or newer, this is " + sys.version.split()[0]) if sys.version_info < (3, 11) else 0'
	test -d $(VENV) || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable .
	touch $@

$(VENV)/.development: $(VENV)/.runtime
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev,eval,tune,track,vision]'
	touch $@

clean:
	rm -rf $(VENV)
