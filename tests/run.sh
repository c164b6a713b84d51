#!/bin/sh
# Every test, each in the environment it is for. Ends with pytest's own summary of each.
set -u
sh tests/install_sshd.sh || exit 1
status=0
run() {
    echo "== $1: $3"
    $1/bin/python -m pytest -q --basetemp=".tmp/$2" $3 || status=1
}
run .venv/host host "tests/contracts tests/host"
run .venv/orchestrator orchestrator "tests/contracts tests/architecture tests/orchestrator tests/integration"
run .venv/orchestrator system "tests/system"
exit $status
