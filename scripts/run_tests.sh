#!/usr/bin/env bash
# Set up the environments of the tests and run the tests.
#
#   bash scripts/run_tests.sh [--all-legs | --leg main|xla|t20|cuda|browser|trl|engines] [--again FILE] [arguments of pytest]
#
#   --all-legs     legs main, t20 and xla, one after the other, each to its end; the exit status is 0
#                  only if all of them pass
#   --leg LEG      leg to run (default: main); cuda is PyTorch's CUDA build over a double of the CUDA
#                  runtime, which needs no card; browser is main with playwright, and runs
#                  tests/browser in Debian's Chromium (apt-get install chromium); trl is main
#                  with TRL and accelerate, and runs tests/trl; engines is main with Ray and an S3
#                  server, and runs tests/engines, also under Debian's openmpi-bin and slurm-wlm
#   --again FILE   file to which the names of tests are added that failed and passed when they ran
#                  again by themselves, in one process; they do not fail the run. No test runs again
#                  where more than ten failed, unless they share a file, and perhaps a fixture.
#
# Three workers share the test files, because tests with ranks mostly wait; the argument `-n 0` of
# pytest runs them in one process. Without arguments of pytest, the main leg leaves out tests/long,
# tests/cluster, tests/browser, tests/trl and tests/engines, which .ci/run runs by themselves, and also
# runs ruff, mypy, import-linter and check_wording.py; each other leg runs the tests that can differ on it.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"
legs=(main)
again=
while [ $# -gt 0 ]; do
    case "$1" in
        --all-legs) legs=(main t20 xla); shift ;;
        --leg) legs=("${2:?--leg needs main, xla, t20, cuda, browser, trl or engines}"); shift 2 ;;
        --again) again=${2:?--again needs a file}; shift 2 ;;
        *) break ;;
    esac
done

export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
export PJRT_DEVICE=${PJRT_DEVICE:-CPU}  # device of the xla leg; set it to use a real one

# Run the checks that read the code, all of them to their end. $1: folder of the programs.
static_checks() {
    local status=0
    "$1/ruff" format --check --quiet . || status=1
    "$1/ruff" check . || status=1
    "$1/mypy" || status=1
    "$1/lint-imports" || status=1
    "$1/python" scripts/check_wording.py || status=1
    return $status
}

# Run pytest for a leg, and with --again the tests that failed once more. $1: leg, $2: its Python.
run_pytest() {
    local status=0 cache failed_first failed_again
    # a test that ends its worker is given to the next one, and would end that too
    local workers=(-n 3 --dist loadfile --max-worker-restart 1 --durations 15)
    if [ -z "$again" ]; then
        "$2" -m pytest "${workers[@]}" "${paths[@]}"
        return
    fi
    cache=$(mktemp -d)  # of this leg alone: pytest remembers here which tests failed
    "$2" -m pytest -o cache_dir="$cache" "${workers[@]}" "${paths[@]}" || status=$?
    if [ $status -eq 1 ]; then  # there are tests that failed, and nothing else is wrong
        failed_first=$(failures "$2" "$cache")
        if few "$failed_first"; then
            echo "=== leg $1: tests that failed, again by themselves"
            status=0
            "$2" -m pytest -o cache_dir="$cache" "${paths[@]}" -n 0 \
                --last-failed --last-failed-no-failures none || status=$?
            failed_again=$(failures "$2" "$cache")
            LC_ALL=C comm -23 <(echo "$failed_first") <(echo "$failed_again") |
                sed "s/^/leg $1: /" >>"$again"
        fi
    fi
    rm -r "$cache"
    return $status
}

# Print the tests that failed, sorted, one a line. $1: a Python, $2: folder of pytest's cache.
failures() {
    "$1" -c 'import json, sys; print(*json.load(open(sys.argv[1])), sep="\n")' \
        "$2/v/cache/lastfailed" | LC_ALL=C sort
}

# Return whether so few tests failed that they may do so for want of time. $1: tests, one a line.
few() {
    [ "$(wc -l <<<"$1")" -le 10 ] || [ "$(sed 's/::.*//' <<<"$1" | uniq | wc -l)" -eq 1 ]
}

# Set `paths` to the tests that can differ on a leg (docs/testing.md, "Legs"). $1: leg.
choose_paths() {
    case "$1" in
        # tests/long takes minutes, and tests/cluster wants the machine alone
        main) paths=(--ignore tests/long --ignore tests/cluster --ignore tests/browser --ignore tests/trl
                     --ignore tests/engines) ;;
        browser) paths=(tests/browser) ;;
        trl) paths=(tests/trl) ;;
        engines) paths=(tests/engines) ;;
        # what trains, resumes and fails on one device or several: equal losses with another torch
        cuda) paths=(tests/cuda tests/contract tests/distributed/test_{equivalence,metric_ranks,ordered_sum}.py
                     tests/distributed/test_{resume,sampling_exchange}.py
                     tests/extras/simulator/test_simulated_cards.py
                     tests/integration/test_{device_faults,golden_losses,lazy_device}.py) ;;
        # another Python, PyTorch, gloo, NumPy and GDAL
        t20) paths=(tests/contract tests/conformance
                    tests/unit/{accelerator,compat,evaluation,geo,host,models}
                    tests/unit/datasets/geotiff tests/unit/distributed tests/unit/launcher
                    tests/unit/engine/{checkpoints,guards,loading}
                    tests/extras/{change,earth,export}
                    tests/distributed/test_{equivalence,metric_ranks,ordered_sum,resume}.py
                    tests/distributed/test_{sampling_exchange,sampling_faults,t20_line}.py
                    tests/integration/test_{entry_points,files_of_before,golden_losses,launchers}.py
                    tests/integration/test_{lazy_device,predict,shipped_vits}.py) ;;
        # a lazy device
        xla) paths=(tests/contract tests/conformance tests/unit/{accelerator,compat,evaluation}
                    tests/unit/distributed/{groups,wrappers} tests/unit/engine/guards
                    tests/unit/models/{losses,mask_transformers} tests/unit/datasets/test_batch_preprocessor.py
                    tests/unit/sampling/hooks/test_group_reward{_settings,s_on_devices}.py
                    tests/extras/{export,streaming/hooks}
                    tests/distributed/test_{equivalence,metric_ranks,ordered_sum,resume,sampling_exchange}.py
                    tests/integration/test_{golden_losses,lazy_device,predict}.py) ;;
    esac
}

paths=("$@")
if [ "${legs[*]}" = browser ] && ! command -v chromium >/dev/null; then
    echo '=== SKIPPED: leg browser: no Chromium here (as root: apt-get install chromium)'
    exit 0
fi

failed=()
times=()
for leg in "${legs[@]}"; do
    echo "=== leg $leg, $(date -u +%H:%M:%S)"
    status=0
    python=$(bash scripts/setup_env.sh "$leg" --dev) || status=$?
    if [ $status -eq 5 ]; then  # the reason is above
        echo "=== SKIPPED: leg $leg: its PyTorch cannot be had on this machine"
        continue
    fi
    [ $status -eq 0 ] || { failed+=("$leg: environment"); continue; }
    # the devices of the process of pytest; a test sets those of the processes that it starts
    [ "$leg" != cuda ] || export CUDA_DOUBLE_DEVICES=${CUDA_DOUBLE_DEVICES:-2}
    [ $# -gt 0 ] || choose_paths "$leg"
    SECONDS=0  # bash counts up from here, so that a leg's time does not include its environment
    checks=
    if [ "$leg" = main ] && [ $# -eq 0 ]; then
        report=$(mktemp)
        static_checks "$(dirname "$python")" >"$report" 2>&1 &  # while tests with ranks wait
        checks=$!
    fi
    run_pytest "$leg" "$python" || failed+=("$leg: pytest")
    if [ -n "$checks" ]; then
        wait "$checks" || failed+=("$leg: ruff, mypy, import-linter or the wording")
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
