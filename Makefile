PYTHON := .venv/bin/python

.PHONY: check test bench demo

# Everything a commit must pass, in about a minute.
check:
	$(PYTHON) -m ruff format --check quantkit tests scripts/*.py
	$(PYTHON) -m ruff check quantkit tests scripts/*.py
	$(PYTHON) -m mypy
	HF_HUB_OFFLINE=1 $(PYTHON) -m pytest -q -x -n 2 --dist loadscope -m "not slow"

test:
	scripts/test

bench:
	@found=0; for script in scripts/bench_*.py; do [ -e "$$script" ] && found=1 && $(PYTHON) "$$script"; done; \
	[ $$found = 1 ] || echo "no benchmark yet: they arrive with the exporter"

demo:
	scripts/demo
