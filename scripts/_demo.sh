# Make the map of the demo's scene, and print the command that shows it in a browser.
# start_8card_training.sh has it called after the training, with WORK_DIR, CONFIG_NAME and SCENE.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
if [ ! -f "$1/last_checkpoint" ] || [ ! -f "$3" ]; then exit 0; fi  # no checkpoint or no scene
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
"$MAPSAGE_PYTHON" "$root/tools/predict.py" "$1/$2" "$(cat "$1/last_checkpoint")" "$3" \
    --out "$1/map" --polygons --overwrite ${ACCELERATOR:+--accelerator "$ACCELERATOR"}
view=("$MAPSAGE_PYTHON" "$root/tools/view.py")
if [ "$PWD" = "$root" ]; then view=("$MAPSAGE_PYTHON" tools/view.py); fi
if [ "${root##*/}" = .mim ]; then view=(mapsage view); fi  # installed
printf '\nThe scene, its map and where the map is wrong, in a browser:\n '
printf ' %q' "${view[@]}" "$1/map" --truth "${3%.tif}_label.tif" --reduce-zero-label
printf '\n'
