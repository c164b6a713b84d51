# Thin targets; the work is in the scripts and modules they call.
PYTHON ?= python3
HOST := .venv/host
ORCHESTRATOR := .venv/orchestrator

.PHONY: help setup demo test check faults bench locks clean

help: ## List the targets.
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/'

setup: $(HOST)/.made $(ORCHESTRATOR)/.made ## Make both virtual environments.

$(HOST)/.made: eagle3_tasks/host_requirements.lock locks/host-development.txt pyproject.toml locks/make_environment.sh
	@sh locks/make_environment.sh $(PYTHON) $(HOST) eagle3_tasks/host_requirements.lock locks/host-development.txt

$(ORCHESTRATOR)/.made: locks/orchestrator.txt locks/orchestrator-development.txt locks/make_environment.sh
	@sh locks/make_environment.sh $(PYTHON) $(ORCHESTRATOR) locks/orchestrator.txt locks/orchestrator-development.txt

demo: setup ## Run the whole pipeline on a tiny model; KEEP=1 leaves the UI up.
	@$(ORCHESTRATOR)/bin/python -m demo.run $(if $(KEEP),--keep)

check: setup ## Format, lint, types, import contracts, spelling.
	@sh tests/check.sh

test: setup check ## Everything that must pass before a change lands.
	@sh tests/run.sh

faults: setup ## Cause faults of network and processes (a minute); EAGLE3_SOAK_ROUNDS=N: more of them.
	@$(ORCHESTRATOR)/bin/python -m pytest -q --basetemp=.tmp/faults tests/faults

bench: setup ## Measure; results as JSON in bench.json.
	@$(HOST)/bin/eagle3 bench store --json | tee bench.json

locks: ## Pin what is installed now (after an upgrade).
	@$(HOST)/bin/python locks/write_locks.py host
	@$(ORCHESTRATOR)/bin/python locks/write_locks.py orchestrator

clean: ## Remove what the demo and the tests made; the environments stay.
	@rm -rf .demo .tmp
