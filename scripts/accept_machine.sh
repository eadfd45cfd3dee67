#!/usr/bin/env bash
# Try everything that MapSage does on a machine of a make that is new to you: the first hour on an
# S60, T20 or CUDA machine. It continues after a failure and leaves one text file to send.
#
#   ACCELERATOR=gcu bash scripts/accept_machine.sh [STEP ...]
#
# The steps, all by default: machine (what it is), doctor, contract (every promise of an accelerator),
# groups (the native and the staged process group train alike), demo (training, scores and pictures),
# resume (killed in the middle, resumed, compared with a run that was not), benchmarks.
#
#   ACCELERATOR, NPROC_PER_NODE, MAPSAGE_PYTHON, MAPSAGE_LEG   as for start_8card_training.sh
#   REPORT         text file to write (default: accept-<host>-<date>.txt)
#   ACCEPT_CONFIG  config of groups, demo and resume (default: the demo)
#   ACCEPT_STEPS   training steps of each run of groups and resume, 4 or more (default: 12)
#   ACCEPT_LIMIT   longest time of a step, as for timeout(1) (default: 30m)
#   ACCEPT_KEEP    folder for the runs; it is kept (default: a temporary one, which is removed)
#
# The exit status is 0 only if every step passed.
set -uo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
report=$(realpath -m "${REPORT:-accept-$(hostname)-$(date +%Y%m%d-%H%M%S).txt}")
cd "$root" || exit 1
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
steps=${ACCEPT_STEPS:-12}
config=${ACCEPT_CONFIG:-configs/demo/efficientnet_lite0_fpn_demo.py}
kept=500  # lines of each step's output in the report
runs=$(realpath -m "${ACCEPT_KEEP:-$(mktemp -d)}")
mkdir -p "$runs"
[ -n "${ACCEPT_KEEP:-}" ] || trap 'rm -rf "$runs"' EXIT

# The environment that start_8card_training.sh will use, with the tests' requirements.
leg() {
    case "${MAPSAGE_LEG:-${ACCELERATOR:-}}" in
        xla) echo xla ;;
        t20|gcu_t20) echo t20 ;;
        *) echo main ;;
    esac
}
python=$(bash scripts/setup_env.sh "$(leg)" --dev) || exit 1

machine() {
    date -u; hostname; uname -a
    git log -1 --format='MapSage commit %H of %cs' 2>/dev/null; git status --short 2>/dev/null
    grep -m1 'model name' /proc/cpuinfo; echo "$(nproc) cores, open files: $(ulimit -n)"; free -g
    env | grep -E '^(ACCELERATOR|NPROC|NNODES|CUDA|NVIDIA|NCCL|TOPS|ENFLAME|ECCL|MAPSAGE|OMP|XLA|PJRT|LD_LIB)' | sort
    local tool
    for tool in nvidia-smi efsmi; do if command -v "$tool"; then "$tool"; fi; done
    "$python" -m pip list 2>/dev/null
    "$python" -c 'from mapsage.accelerator import ACCELERATORS
for kind in ACCELERATORS:
    try:
        print(kind.name, "is unavailable:" if kind.why_unavailable() else "is available", kind.why_unavailable() or "")
    except Exception as error:
        print(kind.name, "is broken:", error)'
}

doctor() {
    if [ "$(cd "$(dirname "$config")" && pwd -P)" = "$(pwd -P)/configs/demo" ]; then
        "$python" tools/make_demo_data.py data/demo
    fi
    bash scripts/doctor.sh "$config"
}

contract() {
    local name
    name=$("$python" -c 'import sys
from mapsage.accelerator import resolve_accelerator
print(resolve_accelerator(sys.argv[1]).name)' "${ACCELERATOR:-auto}" | tail -1) || return 1
    "$python" -m pytest -p no:cacheprovider -rs tests/contract -k "$name-"
}

# train NAME [options]: a short run into the folder NAME.
train() {
    local name=$1
    shift
    WORK_DIR=$runs/$name bash scripts/start_8card_training.sh "$config" "$@" \
        --cfg-options randomness.seed=0 train_cfg.max_iters="$steps" train_cfg.val_interval="$steps" \
        default_hooks.checkpoint.interval="$((steps / 4))" default_hooks.checkpoint.max_keep_ckpts=9 \
        "${options[@]}"
}

compare() { "$python" tools/compare_checkpoints.py "$runs/$1/iter_$steps.pth" "$runs/$2/iter_$steps.pth" "${@:3}"; }

groups() {
    options=()
    train start || return 1
    # from equal weights: a device's own random numbers may differ between the two
    options=(load_from="$runs/start/iter_$steps.pth")
    train native || return 1
    options+=(env_cfg.dist_cfg.backend=gloo)  # on an accelerator: staged through host memory
    train staged || return 1
    compare native staged --tolerance 0.05
}

demo() { WORK_DIR=$runs/demo bash scripts/start_8card_training.sh "$config"; }

# Processes of the run that is to be killed: they inherit this variable.
marked() { grep -slxz "ACCEPT_RUN=$runs" /proc/[0-9]*/environ | cut -d/ -f3; }

resume() {
    options=()
    train whole || return 1
    ACCEPT_RUN=$runs train killed &
    local job=$! first=$runs/killed/iter_$((steps / 4)).pth process
    until [ -e "$first" ]; do
        kill -0 "$job" 2>/dev/null || { echo "the run ended before it wrote $first"; return 1; }
        sleep 0.1
    done
    for process in $(marked); do
        if tr '\0' ' ' <"/proc/$process/cmdline" | grep -q tools/launch.py; then
            echo "killing the launcher, process $process"
            kill -9 "$process"
        fi
    done
    wait "$job" && { echo "the run ended before it could be killed: raise ACCEPT_STEPS"; return 1; }
    sleep 5
    for process in $(marked); do
        echo "left of the killed run: process $process: $(tr '\0' ' ' <"/proc/$process/cmdline")"
        kill -9 "$process"
        job=
    done
    [ -n "$job" ] || return 1
    train killed --resume || return 1
    compare whole killed --tolerance 0.05
}

benchmarks() {
    ACCELERATOR=${ACCELERATOR:-} "$python" tools/benchmarks/launch_time.py
    if [ "${ACCELERATOR:-cuda}" = cuda ] &&
            "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
        bash tools/benchmarks/on_gpu.sh
    fi
}

chosen=("$@")
[ $# -gt 0 ] || chosen=(machine doctor contract groups demo resume benchmarks)
for step in "${chosen[@]}"; do
    case $step in
        machine|doctor|contract|groups|demo|resume|benchmarks) ;;
        *) echo "accept_machine.sh: unknown step '$step': expected machine, doctor, contract, groups," \
                "demo, resume or benchmarks" >&2; exit 2 ;;
    esac
done

export python runs steps config
export -f machine doctor contract train compare groups demo marked resume benchmarks
summary=$runs/summary.txt
: >"$summary"
failed=0
for step in "${chosen[@]}"; do
    SECONDS=0
    timeout -k 30 "${ACCEPT_LIMIT:-30m}" bash -uo pipefail -c "$step" >"$runs/$step.log" 2>&1 </dev/null
    status=$?
    case $status in
        0) word=passed ;;
        124|137) word="FAILED: not done after ${ACCEPT_LIMIT:-30m}"; failed=1 ;;
        *) word="FAILED: exit status $status"; failed=1 ;;
    esac
    printf '%-11s %5d s  %s\n' "$step" "$SECONDS" "$word" | tee -a "$summary"
done

{
    echo "MapSage on $(hostname), $(date -u '+%Y-%m-%d %H:%M UTC'), accelerator ${ACCELERATOR:-auto}," \
         "ranks: ${NPROC_PER_NODE:-one for each card, 8 without cards}"
    cat "$summary"
    for step in "${chosen[@]}"; do
        printf '\n===== %s (the last %s lines)\n' "$step" "$kept"
        tail -n "$kept" "$runs/$step.log"
    done
} >"$report"
echo "report: $report"
exit $failed
