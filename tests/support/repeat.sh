#!/usr/bin/env bash
# repeat.sh RUNS LOOPS: `make test` so many times in a row with so many busy loops beside it, as on a machine that others use too. No second
# tries. Prints a line a run, keeps the output of those that failed in a directory that it names, and exits with 1 if any did.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
runs=${1:-10} loops=${2:-2}
kept=$(mktemp -d) failed=0 busy=()
trap 'kill "${busy[@]}" 2>/dev/null; wait 2>/dev/null' EXIT
for ((i = 0; i < loops; i++)); do
  sh -c 'while :; do :; done' &
  busy+=($!)
done
for ((run = 1; run <= runs; run++)); do
  began=$SECONDS
  if PYTEST_ADDOPTS="-p no:rerunfailures" make test >"$kept/$run.log" 2>&1 </dev/null; then verdict=green; else
    verdict="FAILED: $(grep -E '^(FAILED|ERROR) ' "$kept/$run.log" | tr '\n' ' ')"
    failed=1
  fi
  printf 'run %2d of %d: %4d s, load %s, %s\n' "$run" "$runs" "$((SECONDS - began))" "$(cut -d' ' -f1 /proc/loadavg)" "$verdict"
done
((failed)) && echo "the output of every run is in $kept" || rm -rf "$kept"
exit "$failed"
