#!/bin/sh
# Format, lint, types, import contracts, spelling. The same for a person and for CI.
set -eu
mkdir -p .tmp
bin=.venv/orchestrator/bin
$bin/ruff format --check --quiet .
$bin/ruff check --quiet .
$bin/basedpyright --level error
PYTHONPATH=.:plugins $bin/lint-imports --no-cache >.tmp/lint-imports.log 2>&1 || { tail -n 40 .tmp/lint-imports.log; exit 1; }
$bin/codespell --ignore-words-list nmae,nam README.md CHANGELOG.md CONTRIBUTING.md docs dags plugins eagle3_tasks demo tests docker
echo "check: clean"
