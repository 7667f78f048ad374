# Each target works from a fresh clone: the virtual environment is made when it is missing or out of date.
PYTHON ?= python3
RUN = .venv/bin/python -m
.DEFAULT_GOAL := help

help:            ## what there is
	@grep -E '^[a-z-]+:.*## ' Makefile | sed 's/:.*## /\t/'

venv:            ## make .venv with what training needs
	@$(PYTHON) tools/make_venv.py

dev:             ## the same, and what the tests need
	@$(PYTHON) tools/make_venv.py dev

train: venv      ## train the tiny recipe on the text of this Python installation, then open runs/*/report.html
	@.venv/bin/surefoot train tiny

drill: venv      ## plant one bad document and see what the guard does; opens offline: runs/drill-quick/drill.html
	@.venv/bin/surefoot drill --quick

test: dev        ## the test suite
	@OMP_NUM_THREADS=1 $(RUN) pytest -n 2 --dist worksteal -m "not proof and not device"

check: dev       ## format, lint, types and the laws of the tree
	@$(RUN) ruff format --check src tests benchmarks tools
	@$(RUN) ruff check src tests benchmarks tools
	@$(RUN) mypy
	@OMP_NUM_THREADS=1 $(RUN) pytest tests/architecture

proof: dev       ## the long proofs; resumable, results under docs/proof
	@OMP_NUM_THREADS=1 $(RUN) pytest -m "proof and not device"
	@$(RUN) surefoot.proof.kill --kills 100 --out docs/proof
	@.venv/bin/surefoot drill --out docs/proof/drill --markdown docs/drill.md
	@.venv/bin/surefoot parity tiny --out docs/proof/parity --markdown docs/parity.md
	@$(RUN) surefoot.scale.transfer_proof --out docs/proof/transfer --docs docs

device-check: dev ## the checks that need a GPU, about five minutes on an H200; without one, whether their script runs
	@$(RUN) pytest -m device tests/device -s
	@.venv/bin/python benchmarks/device_check.py --budget-s 200 --out $${OUT:-runs}/device-check.json

.PHONY: help venv dev train drill test check proof device-check
