#!/usr/bin/env bash
# Instruction counts of the warm paths against their limits (benches/benches/icount.rs). Exit 1: a limit broke.
set -euo pipefail
cd "$(dirname "$0")/.."

version=$(sed -n '/^name = "gungraun"$/{n;s/^version = "\(.*\)"$/\1/p}' Cargo.lock)
missing=0
command -v valgrind >/dev/null 2>&1 || { echo "valgrind is missing: apt-get install valgrind"; missing=1; }
command -v gungraun-runner >/dev/null 2>&1 || [ -x "${CARGO_HOME:-$HOME/.cargo}/bin/gungraun-runner" ] ||
  { echo "gungraun-runner is missing: cargo install gungraun-runner --version $version --locked"; missing=1; }
[ "$missing" = 0 ] || { echo "not run: instruction counts"; exit 2; }

exec cargo bench --quiet -p evergraph-benches --bench icount -- "$@"
