# Short names for what contributors run; `make check` is also the pre-commit hook.
python := .venv/bin/python
benches := $(wildcard scripts/bench_*.py)

.PHONY: check style test bench demo

check: .venv/bin/ruff
	$(python) -m ruff format --check
	$(python) -m ruff check
	$(python) -m mypy
	scripts/test --quick -x  # `make test` runs all

style: .venv/bin/ruff
	$(python) -m ruff format
	$(python) -m ruff check --fix

test:
	scripts/test

bench:
ifeq ($(benches),)
	@echo "no benchmark yet: a file scripts/bench_NAME.py becomes one"
else
	scripts/setup
	set -e; for bench in $(benches); do echo "== $$bench"; $(python) $$bench; done
endif

demo:
	scripts/demo

.venv/bin/ruff:
	scripts/setup
	$(python) -m pip install --quiet --disable-pip-version-check -e '.[trace,dev]'
