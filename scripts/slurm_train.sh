#!/usr/bin/env bash
# Train under Slurm, with one task per card. Inside or outside an allocation:
#
#   sbatch --nodes 2 --ntasks-per-node 8 --gres gpu:8 scripts/slurm_train.sh CONFIG [options]
#   srun   --nodes 2 --ntasks-per-node 8 --gres gpu:8 bash scripts/slurm_train.sh CONFIG [options]
#
# Options are those of tools/train.py. By default the ranks use the first node's address and a port
# derived from the job id. The script reads MASTER_ADDR, MASTER_PORT, ACCELERATOR, WORK_DIR,
# MAPSAGE_PYTHON, MAPSAGE_LEG, and MAPSAGE_ENVS, a folder on storage that all nodes share.
set -euo pipefail

if [ $# -lt 1 ]; then
    sed -n '2,10p' "$0" >&2
    exit 2
fi
# sbatch runs a copy of this file, so the project is expected in the folder of the submission.
root=${MAPSAGE_ROOT:-${SLURM_SUBMIT_DIR:-$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)}}
cd "$root"
python=$(bash scripts/setup_env.sh "${MAPSAGE_LEG:-main}")
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
config=$1
shift
command=("$python" tools/train.py "$config" --launcher slurm
         ${ACCELERATOR:+--accelerator "$ACCELERATOR"} ${WORK_DIR:+--work-dir "$WORK_DIR"} "$@")
if [ -n "${SLURM_PROCID:-}" ] && [ -n "${SLURM_STEP_ID:-}" ]; then
    exec "${command[@]}"  # srun has started this script once per task
fi
# If a task dies, srun ends the others.
exec srun --kill-on-bad-exit=1 "${command[@]}"
