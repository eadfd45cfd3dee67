# The demo's programs beside the training, which start_8card_training.sh lets the launcher run:
#
#   bash _demo.sh data FOLDER                   before the ranks start: make the demo data
#   bash _demo.sh map WORK_DIR CONFIG_NAME SCENE    after the training: make the map of the demo's
#                                               scene, and print the command that shows it in a browser
#
# MAPSAGE_FORK_CALL comes from the launcher, where programs can be forked from the process that has
# imported everything (mapsage_launcher/ranks/rank_start.py).
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

run_program() {
    if [ -n "${MAPSAGE_FORK_CALL:-}" ]; then
        eval "$MAPSAGE_FORK_CALL" '"$$" "$@"'
    else
        "$MAPSAGE_PYTHON" "$@"
    fi
}

if [ "$1" = data ]; then
    run_program "$root/tools/make_demo_data.py" "$2"
    exit
fi
shift
if [ ! -f "$1/last_checkpoint" ] || [ ! -f "$3" ]; then exit 0; fi  # no checkpoint or no scene
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
run_program "$root/tools/predict.py" "$1/$2" "$(cat "$1/last_checkpoint")" "$3" \
    --out "$1/map" --polygons --overwrite ${ACCELERATOR:+--accelerator "$ACCELERATOR"}
view=("$MAPSAGE_PYTHON" "$root/tools/view.py")
if [ "$PWD" = "$root" ]; then view=("$MAPSAGE_PYTHON" tools/view.py); fi
if [ "${root##*/}" = .mim ]; then view=(mapsage view); fi  # installed
printf '\nThe scene, its map and where the map is wrong, in a browser:\n '
printf ' %q' "${view[@]}" "$1/map" --truth "${3%.tif}_label.tif" --reduce-zero-label
printf '\n'
