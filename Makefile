# Two commands need nothing but Python 3.11+, pip and make: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
TEST := OMP_NUM_THREADS=1 $(BIN)/pytest --numprocesses 2 --dist loadfile

.PHONY: demo test long check clean

demo: $(VENV)/.runtime
	$(BIN)/gatelab demo

# Parts whose functions state shapes are tested with these checked, but for what is compiled or started as a program.
CHECKED := tests/gates tests/model tests/diagnose tests/train
SHAPES := --jaxtyping-packages=gatelab.gates,gatelab.model,gatelab.diagnose,gatelab.train,beartype.beartype
HERE := not long and not network and not peer and not gpu

test: $(VENV)/.development check
	$(TEST) -m "$(HERE) and not compile and not slow" $(SHAPES) $(CHECKED)
	$(TEST) -m "$(HERE) and (compile or slow)" $(CHECKED)
	$(TEST) -m "$(HERE)" tests $(addprefix --ignore=,$(CHECKED))

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
