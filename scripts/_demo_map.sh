# Make the map of the demo's scene. start_8card_training.sh has it called after the training, with
# WORK_DIR, CONFIG_NAME and SCENE.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
if [ ! -f "$1/last_checkpoint" ] || [ ! -f "$3" ]; then exit 0; fi  # no checkpoint or no scene
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
exec "$MAPSAGE_PYTHON" "$root/tools/predict.py" "$1/$2" "$(cat "$1/last_checkpoint")" "$3" \
    --out "$1/map" --polygons --overwrite ${ACCELERATOR:+--accelerator "$ACCELERATOR"}
