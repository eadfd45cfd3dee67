#!/usr/bin/env bash
# Download the published encoders that MapSage's are compared with, once per machine (15 MB, seconds),
# and print the folder. PyTorch, NumPy and huggingface_hub are those of the main leg.
#
#   bash scripts/earth_oracles.sh
#
#   MAPSAGE_ENVS     folder of the environments (default: ~/.cache/mapsage/envs)
#
# Exit status 5: the packages cannot be had on this machine.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
# Versions whose files tests/earth_oracles.py names. torchgeo and terratorch are loaded file by file.
packages=(olmoearth-pretrain-minimal==0.1.5 torchgeo==0.10.1 terratorch==1.2.13 timm==1.0.31
          einops==0.8.2 universal-pathlib==0.3.10 pathlib-abc==0.5.2 fsspec==2026.9.0)
folder=${MAPSAGE_ENVS:-${XDG_CACHE_HOME:-$HOME/.cache}/mapsage/envs}/earth-$(echo "${packages[@]}" | sha256sum | head -c 16)
if [ ! -d "$folder" ]; then
    python=$(bash "$root/scripts/setup_env.sh" main --dev)
    mkdir -p "$(dirname "$folder")"
    download=$(mktemp -d "$folder.XXXXXX")
    # torchgeo's package asks for a newer Python than its file dofa.py needs.
    if ! timeout 300 "$python" -m pip install --quiet --no-deps --no-compile --ignore-requires-python \
            --disable-pip-version-check --target "$download" "${packages[@]}" >&2; then
        rm -r "$download"
        echo "[earth_oracles] the packages could not be installed" >&2
        exit 5
    fi
    # Another process may have been faster.
    mv -T "$download" "$folder" 2>/dev/null || rm -r "$download"
fi
echo "$folder"
