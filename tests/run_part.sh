#!/usr/bin/env bash
# run_part.sh NAME COMMAND…: runs pytest for one part of the tests.
# Its results go to .cache/test-NAME.xml and its times to .cache/test-NAME.time, for support/summary.py.
set -u
mkdir -p .cache
rm -f ".cache/test-$1.xml" ".cache/test-$1.time"
TIMEFORMAT='%U %S %R'
{ time "${@:2}" --junitxml=".cache/test-$1.xml" -o "cache_dir=.pytest_cache/$1" 2>&3; } 3>&2 2>".cache/test-$1.time"
status=$?
[ $status != 5 ] || exit 0 # a choice by -k may leave nothing for this part
exit $status
