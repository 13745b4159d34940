#!/usr/bin/env bash
# Sees to it that a redis-server (or valkey-server) is here for the tests: installs Debian's where root may, else says what to do. Never fails: without
# one the tests that need it are skipped, and pytest says so. The tests start servers of their own; the service that a package may start is stopped.
set -uo pipefail

have() { command -v redis-server >/dev/null || command -v valkey-server >/dev/null; }

have && exit 0
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
  echo "installing redis-server for the tests (once)" >&2
  export DEBIAN_FRONTEND=noninteractive
  log=$(mktemp)
  {
    timeout 300 apt-get update -qq
    timeout 300 apt-get install -qq -y --no-install-recommends redis-server
  } >"$log" 2>&1 </dev/null || tail -n 5 "$log" >&2
  rm -f "$log"
  if have; then
    service redis-server stop >/dev/null 2>&1 || true
    exit 0
  fi
fi
echo "the tests of the Redis tier will be SKIPPED: there is no redis-server. Install it (Debian, Ubuntu: apt-get install redis-server), or valkey-server." >&2
