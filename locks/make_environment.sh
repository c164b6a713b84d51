#!/bin/sh
# Make one virtual environment from lock files: make_environment.sh PYTHON FOLDER LOCK...
set -eu
python=$1 folder=$2
shift 2

"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || {
    echo "Python 3.11 or later is needed, but '$python' is $("$python" --version 2>&1 || echo absent)." >&2
    echo "Name one: make PYTHON=/path/to/python3.12 $folder" >&2
    exit 1
}
echo "== making $folder from $*"
began=$(date +%s)
"$python" -m venv --clear "$folder" || {
    echo "The venv module is missing. On Debian: apt-get install python3-venv" >&2
    exit 1
}
arguments=""
for lock in "$@"; do arguments="$arguments -r $lock"; done
# shellcheck disable=SC2086 # the words are wanted
"$folder/bin/python" -m pip install --quiet --disable-pip-version-check $arguments 2>"$folder/pip.log" || {
    cat "$folder/pip.log" >&2
    exit 1
}
case $folder in
*host)
    # The `eagle3` command, from this checkout. Dependencies are the lock's alone.
    "$folder/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps --editable . 2>>"$folder/pip.log" || {
        cat "$folder/pip.log" >&2
        exit 1
    }
    # Left behind, it would offer its entry points to whoever runs from this folder.
    rm -rf eagle3_airflow.egg-info build
    ;;
esac
touch "$folder/.made"
echo "== made $folder seconds=$(($(date +%s) - began))"
