#!/usr/bin/env bash
# Train on all cards of a machine (or of several), evaluate, and leave a picture.
#
#   bash scripts/start_8card_training.sh [CONFIG] [options of tools/train.py]
#
# Without CONFIG: makes the demo data and trains the demo config. Sets up its environment itself.
#
#   NPROC_PER_NODE   ranks on this machine (default 8)
#   NNODES           machines (default 1)      NODE_RANK     which one this is (default 0)
#   MASTER_ADDR      address of machine 0      MASTER_PORT   its port (default: a free one;
#                    (needed if NNODES > 1)                  29500 with several machines)
#   ACCELERATOR      auto, cuda, gcu, gcu_t20, xla, cpu (default: what the config says, else auto)
#   WORK_DIR         where logs, checkpoints and pictures go (default work_dirs/<config name>)
#   MAPSAGE_PYTHON   use this Python instead of the environment of scripts/setup_env.sh
#   MAPSAGE_LEG      main, xla or t20: which environment (default: the one of ACCELERATOR, else main)
#
# Ctrl-C or a dead rank ends all ranks; the first failing rank's own error is the last thing
# printed, and the exit status is not 0.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
case "${ACCELERATOR:-}" in
    xla) leg=xla ;;
    gcu_t20) leg=t20 ;;
    *) leg=main ;;
esac
python=$(bash "$root/scripts/setup_env.sh" "${MAPSAGE_LEG:-$leg}")

if [ $# -gt 0 ] && [[ "$1" != -* ]]; then
    config=$1
    shift
    # Paths are relative to where the user stands; a shipped config is found from anywhere.
    if [ ! -f "$config" ] && [ -f "$root/$config" ]; then config=$root/$config; fi
else
    cd "$root"
    config=configs/demo/efficientnet_lite0_fpn_demo.py
    "$python" tools/make_demo_data.py data/demo
fi

ranks=${NPROC_PER_NODE:-8}
nodes=${NNODES:-1}
if [ "$nodes" -eq 1 ] && [ -z "${MASTER_PORT:-}" ]; then
    rendezvous=(--rdzv_backend c10d --rdzv_endpoint localhost:0)
else
    if [ "$nodes" -gt 1 ] && [ -z "${MASTER_ADDR:-}" ]; then
        echo "error: NNODES=$nodes needs MASTER_ADDR, the address of machine 0" >&2
        exit 2
    fi
    rendezvous=(--node_rank "${NODE_RANK:-0}" --master_addr "${MASTER_ADDR:-127.0.0.1}"
                --master_port "${MASTER_PORT:-29500}")
fi

# One thread a rank unless told otherwise: ranks share the cores.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} MKL_NUM_THREADS=${MKL_NUM_THREADS:-1}

exec "$python" "$root/tools/launch.py" --nnodes "$nodes" --nproc_per_node "$ranks" "${rendezvous[@]}" \
    "$root/tools/train.py" "$config" --launcher pytorch \
    ${ACCELERATOR:+--accelerator "$ACCELERATOR"} ${WORK_DIR:+--work-dir "$WORK_DIR"} "$@"
