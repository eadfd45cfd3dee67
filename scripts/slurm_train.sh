#!/usr/bin/env bash
#SBATCH --requeue --open-mode=append
#SBATCH --signal=B:USR1@120
# Train under Slurm, with one task per card. Inside or outside an allocation:
#
#   sbatch --nodes 2 --ntasks-per-node 8 --gres gpu:8 scripts/slurm_train.sh CONFIG [options]
#   srun   --nodes 2 --ntasks-per-node 8 --gres gpu:8 bash scripts/slurm_train.sh CONFIG [options]
#
# CONFIG is relative to the folder of the submission; a shipped config is found from any folder.
# It takes the options of tools/train.py. By default the ranks use the first node's address and a port
# derived from the job id. The script reads MASTER_ADDR, MASTER_PORT, ACCELERATOR, WORK_DIR,
# MAPSAGE_PYTHON, MAPSAGE_LEG, and MAPSAGE_ENVS, a folder on storage that all nodes share. sbatch
# runs a copy of this file: submitted from another folder than the project's, it asks scontrol where
# the original is; MAPSAGE_ROOT, the project's folder, says so where there is no scontrol.
#
# A job of sbatch saves and queues itself again 120 s before its time limit; it continues by itself.
# sbatch --signal=B:USR1@600 gives it more time, where a step or a validation takes longer;
# sbatch --no-requeue lets it end with status 85 instead.
set -euo pipefail

if [ $# -lt 1 ]; then
    sed -n '4,19p' "$0" >&2
    exit 2
fi

# Print the first folder that holds the project.
find_project() {
    local original folder
    original=$(scontrol show job "${SLURM_JOB_ID:-}" 2>/dev/null |
        sed -n 's/^ *Command=\([^ ]*slurm_train\.sh\).*/\1/p' | head -n 1) || true
    for folder in "${MAPSAGE_ROOT:-}" "$(dirname "${BASH_SOURCE[0]}")/.." \
            ${original:+"$(dirname "$original")/.."} "${SLURM_SUBMIT_DIR:-}"; do
        if [ -n "$folder" ] && [ -f "$folder/scripts/_launch.sh" ]; then
            (cd "$folder" && pwd)
            return
        fi
    done
    echo "error: the project's folder is not known, since sbatch runs a copy of this script." \
        "Set MAPSAGE_ROOT to it, or submit from there." >&2
    return 1
}

# Whether Slurm says all of this about the job, such as JobState=RUNNING.
job_is() {
    local facts fact
    facts=" $(scontrol show job "$SLURM_JOB_ID" 2>/dev/null | tr -s '\n' ' ') "
    for fact; do
        [[ "$facts" == *" $fact "* ]] || return 1
    done
}

project=$(find_project) || exit 2
source "$project/scripts/_launch.sh"
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
config=$(find_config "$1")
shift
if [ "${SLURM_RESTART_COUNT:-0}" -gt 0 ] && [[ " $* " != *" --resume"* ]]; then
    set -- "$@" --resume  # the job has been in the queue before
fi
command=("$python" "$root/tools/train.py" "$config" --launcher slurm
         ${ACCELERATOR:+--accelerator "$ACCELERATOR"} ${WORK_DIR:+--work-dir "$WORK_DIR"} "$@")
if [ -n "${SLURM_PROCID:-}" ] && [ -n "${SLURM_STEP_ID:-}" ]; then
    exec "${command[@]}"  # srun has started this script once per task
fi
# The tasks prove to each other that they belong to this job. srun passes the variable on.
if [ -z "${MAPSAGE_SECRET:-}${MAPSAGE_SECRET_FILE:-}" ]; then
    MAPSAGE_SECRET=$(od -An -N32 -tx1 /dev/urandom | tr -d ' \n')
    export MAPSAGE_SECRET
fi
# If a task dies, srun ends the others.
command=(srun --kill-on-bad-exit=1 "${command[@]}")
if ! job_is BatchFlag=1; then
    exec "${command[@]}"
fi

# The ranks on this node look into this folder, see mapsage_launcher/stop_request.py. The signal
# itself would end tasks that are still starting.
MAPSAGE_ERROR_NOTES=$(mktemp -d)
export MAPSAGE_ERROR_NOTES
trap 'rm -rf "$MAPSAGE_ERROR_NOTES"' EXIT
trap 'interrupted=1; echo "signal of Slurm" >"$MAPSAGE_ERROR_NOTES/stop"' USR1 TERM
interrupted=1 status=0
"${command[@]}" &
while [ -n "$interrupted" ]; do
    interrupted='' status=0
    wait $! || status=$?
done
if [ -e "$MAPSAGE_ERROR_NOTES/left" ]; then status=85; fi
# A job that was canceled is not RUNNING any more, and one that Slurm has queued again is not either.
if [ "$status" -eq 85 ] && job_is JobState=RUNNING Requeue=1; then
    echo "job $SLURM_JOB_ID has left as it was asked to, and is queued again"
    scontrol requeue "${SLURM_ARRAY_JOB_ID:-$SLURM_JOB_ID}${SLURM_ARRAY_TASK_ID:+_$SLURM_ARRAY_TASK_ID}"
fi
exit "$status"
