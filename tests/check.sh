#!/bin/sh
# Format, lint, types, import contracts, spelling. The same for a person and for CI.
set -eu
bin=.venv/orchestrator/bin
$bin/ruff format --check --quiet .
$bin/ruff check --quiet .
$bin/basedpyright --level error
$bin/lint-imports --no-cache 2>&1 | tail -n 3
$bin/codespell README.md CHANGELOG.md CONTRIBUTING.md docs dags plugins eagle3_tasks demo tests docker
echo "check: clean"
