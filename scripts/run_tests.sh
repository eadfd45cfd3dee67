#!/usr/bin/env bash
# Set up the environments of the tests and run the tests.
#
#   bash scripts/run_tests.sh [--all-legs | --leg main|xla|t20] [arguments of pytest]
#
# Two workers share the test files; the argument `-n 0` of pytest runs them in one process. Without
# arguments of pytest, the main leg also runs ruff, mypy and import-linter. With --all-legs the legs
# run one after the other, each to its end, and the exit status is 0 only if all of them pass.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"
legs=(main)
case "${1:-}" in
    --all-legs) legs=(main t20 xla); shift ;;
    --leg) legs=("${2:?--leg needs main, xla or t20}"); shift 2 ;;
esac

export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
export PJRT_DEVICE=${PJRT_DEVICE:-CPU}  # device of the xla leg; set it to use a real one

# Run the checks that read the code, all of them to their end. $1: folder of the programs.
static_checks() {
    local status=0
    "$1/ruff" check . || status=1
    "$1/mypy" || status=1
    "$1/lint-imports" || status=1
    return $status
}

failed=()
times=()
for leg in "${legs[@]}"; do
    echo "=== leg $leg"
    python=$(bash scripts/setup_env.sh "$leg" --dev) || { failed+=("$leg: environment"); continue; }
    SECONDS=0  # bash counts up from here, so that a leg's time does not include its environment
    checks=
    if [ "$leg" = main ] && [ $# -eq 0 ]; then
        report=$(mktemp)
        static_checks "$(dirname "$python")" >"$report" 2>&1 &  # while tests with ranks wait
        checks=$!
    fi
    "$python" -m pytest -n 2 --dist loadfile --durations 15 "$@" || failed+=("$leg: pytest")
    if [ -n "$checks" ]; then
        wait "$checks" || failed+=("$leg: ruff, mypy or import-linter")
        cat "$report"
        rm "$report"
    fi
    times+=("leg $leg took $SECONDS s")
done

for line in ${times[@]+"${times[@]}"}; do echo "=== $line"; done
if [ ${#failed[@]} -gt 0 ]; then
    echo "=== failed: ${failed[*]}" >&2
    exit 1
fi
echo "=== passed: ${legs[*]}"
