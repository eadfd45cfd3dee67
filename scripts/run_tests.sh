#!/usr/bin/env bash
# Set up the environments of the tests and run the tests.
#
#   bash scripts/run_tests.sh [--all-legs | --leg main|xla|t20|cuda|browser|trl|engines] [--long] [arguments of pytest]
#
#   --all-legs     legs main, t20 and xla, one after the other, each to its end; the exit status is 0
#                  only if all of them pass
#   --leg LEG      leg to run (default: main); cuda is PyTorch's CUDA build over a double of the CUDA
#                  runtime, which needs no card; browser is main with playwright, and runs
#                  tests/browser in Debian's Chromium (apt-get install chromium); trl is main
#                  with TRL and accelerate, and runs tests/trl; engines is main with Ray and an S3
#                  server, and runs tests/engines, also under Debian's openmpi-bin and slurm-wlm
#   --long         tests/long and the tests that are marked `long`, which a run without it leaves out
#
# Three workers share the test files, because tests with ranks mostly wait; the argument `-n 0` of
# pytest runs them in one process. Without arguments of pytest, the main leg leaves out what is long,
# tests/cluster, tests/browser, tests/trl and tests/engines, which .ci/run runs by themselves, and also
# runs ruff, mypy, import-linter and check_wording.py; each other leg runs the tests that can differ on it.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"
legs=(main)
long=
while [ $# -gt 0 ]; do
    case "$1" in
        --all-legs) legs=(main t20 xla); shift ;;
        --leg) legs=("${2:?--leg needs main, xla, t20, cuda, browser, trl or engines}"); shift 2 ;;
        --long) long=1; shift ;;
        *) break ;;
    esac
done

export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
export PJRT_DEVICE=${PJRT_DEVICE:-CPU}  # device of the xla leg; set it to use a real one
# Images of containers often set it. Each worker would then compile all test files again, and each process MapSage.
unset PYTHONDONTWRITEBYTECODE

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

# Set `paths` to the tests that can differ on a leg (docs/testing.md, "Legs"). $1: leg.
choose_paths() {
    case "$1" in
        # tests/cluster wants the machine alone
        main) paths=(--ignore tests/cluster --ignore tests/browser --ignore tests/trl --ignore tests/engines) ;;
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
                    tests/extras/{calibration,change,earth,export,mask_transformers} tests/extras/labels/rewards/test_{rewards,group_reward}.py
                    tests/distributed/test_{equivalence,metric_ranks,ordered_sum,resume}.py
                    tests/distributed/test_{sampling_exchange,sampling_faults,t20_line}.py
                    tests/integration/test_{entry_points,files_of_before,golden_losses,launchers}.py
                    tests/integration/test_{lazy_device,predict,shipped_vits}.py ${long:+tests/long}) ;;
        # a lazy device
        xla) paths=(tests/contract tests/unit/{accelerator,compat,evaluation}
                    tests/unit/distributed/{groups,wrappers} tests/unit/engine/guards
                    tests/unit/models/losses tests/unit/datasets/test_batch_preprocessor.py
                    tests/extras/labels/rewards/test_{rewards,group_reward,group_reward_settings,group_rewards_on_devices}.py
                    tests/extras/{calibration,export,mask_transformers,streaming/hooks}
                    tests/distributed/test_{equivalence,metric_ranks,ordered_sum,resume,sampling_exchange}.py
                    tests/integration/test_{golden_losses,lazy_device,predict}.py ${long:+tests/long}) ;;
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
    # the devices of the process of pytest; a test sets the devices of the processes that it starts
    [ "$leg" != cuda ] || export CUDA_DOUBLE_DEVICES=${CUDA_DOUBLE_DEVICES:-2}
    [ $# -gt 0 ] || choose_paths "$leg"
    marks=()
    if [ -n "$long" ]; then
        marks=(-m long)
    elif [ $# -eq 0 ] && [[ " main t20 xla " == *" $leg "* ]]; then
        marks=(-m 'not long')
    fi
    SECONDS=0  # bash counts up from here, so that a leg's time does not include its environment
    checks=
    if [ "$leg" = main ] && [ $# -eq 0 ] && [ -z "$long" ]; then
        report=$(mktemp)
        static_checks "$(dirname "$python")" >"$report" 2>&1 &  # while tests with ranks wait
        checks=$!
    fi
    # a test that ends its worker is given to the next one, and would end that too
    "$python" -m pytest -n 3 --dist loadfile --max-worker-restart 1 --durations 15 ${marks[@]+"${marks[@]}"} "${paths[@]}" ||
        failed+=("$leg: pytest")
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
