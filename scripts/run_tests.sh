#!/usr/bin/env bash
# Set up what is needed and run the tests.
#
#   bash scripts/run_tests.sh [--all-legs | --leg main|xla|t20] [arguments of pytest]
#
# The main leg also runs ruff, mypy and import-linter. With --all-legs every leg runs to its end,
# and the exit status is 0 only when all of them passed.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"
legs=(main)
case "${1:-}" in
    --all-legs) legs=(main t20 xla); shift ;;
    --leg) legs=("${2:?--leg needs main, xla or t20}"); shift 2 ;;
esac

export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
export PJRT_DEVICE=${PJRT_DEVICE:-CPU}  # the xla leg's device, unless there is a real one

failed=()
for leg in "${legs[@]}"; do
    echo "=== leg $leg"
    python=$(bash scripts/setup_env.sh "$leg" --dev) || { failed+=("$leg: environment"); continue; }
    if [ "$leg" = main ] && [ $# -eq 0 ]; then
        tools=$(dirname "$python")
        "$tools/ruff" check . || failed+=("ruff")
        "$tools/mypy" || failed+=("mypy")
        "$tools/lint-imports" || failed+=("import-linter")
    fi
    "$python" -m pytest "$@" || failed+=("$leg: pytest")
done

if [ ${#failed[@]} -gt 0 ]; then
    echo "=== failed: ${failed[*]}" >&2
    exit 1
fi
echo "=== passed: ${legs[*]}"
