# Sourced by the scripts that start ranks. The top of start_8card_training.sh describes the
# variables that are read here.
#
# Sets root and python; defines find_config CONFIG, is_demo CONFIG and
# launch PROGRAM CONFIG [options].

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
case "${ACCELERATOR:-}" in
    xla) leg=xla ;;
    gcu_t20) leg=t20 ;;
    *) leg=main ;;
esac
python=$(bash "$root/scripts/setup_env.sh" "${MAPSAGE_LEG:-$leg}")

# Paths are relative to the current folder. A shipped config is also found from other folders, with
# or without configs/ in front.
find_config() {
    local path
    for path in "$1" "$root/$1" "$root/configs/$1"; do
        if [ -f "$path" ]; then
            echo "$path"
            return
        fi
    done
    echo "$1"
}

# Whether a config is one of configs/demo, however its path is written.
is_demo() {
    local folder
    folder=$(cd "$(dirname "$1")" 2>/dev/null && pwd -P) || return 1
    [ "$folder" = "$(cd "$root/configs/demo" && pwd -P)" ]
}

# Replace this process by the launcher of NPROC_PER_NODE ranks of a program in tools/, by default one
# for each card. The launcher reads NNODES and what a scheduler says. CONFIG may be empty.
launch() {
    local program=$root/tools/$1 config=$2 ranks=${NPROC_PER_NODE:-${PET_NPROC_PER_NODE:-cards}}
    shift 2
    case $ranks in auto|gpu) ranks=cards ;; esac  # torchrun would count the cards of CUDA alone

    # One thread per rank by default, since the ranks share the cores.
    export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} MKL_NUM_THREADS=${MKL_NUM_THREADS:-1}

    exec "$python" "$root/tools/launch.py" --nproc_per_node "$ranks" \
        "$program" ${config:+"$config"} --launcher pytorch \
        ${ACCELERATOR:+--accelerator "$ACCELERATOR"} ${WORK_DIR:+--work-dir "$WORK_DIR"} "$@"
}
