#!/usr/bin/env bash
# install.sh PYTHON ARGUMENTS…: runs `pip install` in the environment of that interpreter. Prints a line of progress now
# and then. The output of pip goes to a file under .cache/install, which is named if pip fails.
set -euo pipefail
python=$1
environment=$(basename "$(dirname "$(dirname "$python")")")
log=.cache/install/${environment#.}.log
every=${INSTALL_LINE_EVERY_SEC:-10}

# The current step of pip, without folders and details.
at_work() {
  local step
  step=$(grep -aE '^ *(Collecting|Downloading|Using cached|Processing|Building|Preparing|Installing) ' "$log" | tail -n 1 |
    sed -E 's/^ *//; /^(Building|Preparing|Installing)/s/:.*//; s, [^ ]*/, ,; s/ .from .*//') || true
  echo "${step:-resolving dependencies}" | cut -c 1-80
}

mkdir -p "$(dirname "$log")"
printf '\n$ pip install %s\n' "${*:2}" > "$log"
"$python" -m pip --disable-pip-version-check install --progress-bar off "${@:2}" >> "$log" 2>&1 &
pip=$!
trap 'kill "$pip" 2>/dev/null || true' EXIT
waited=0
while kill -0 "$pip" 2>/dev/null; do
  sleep 0.2
  waited=$((waited + 1))
  [ $((waited % (every * 5))) -ne 0 ] || printf '  %d s: %s\n' $((waited / 5)) "$(at_work)"
done
status=0
wait "$pip" || status=$?
trap - EXIT
[ "$status" -ne 0 ] || exit 0
if grep -qE 'NewConnectionError|NameResolutionError|ConnectTimeoutError|ProxyError|Network is unreachable' "$log"; then
  echo "cannot reach the package index: the first run needs a network (output of pip: $log)" >&2
else
  reason=$(grep -aoE 'ERROR: .*' "$log" | tail -n 1 || true)
  reason=${reason:-$(grep -aoE 'error: .*' "$log" | tail -n 1 || true)}
  echo "pip failed: ${reason:-it ended with status $status} (output of pip: $log)" >&2
fi
exit 1
