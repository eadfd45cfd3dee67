#!/usr/bin/env bash
# Download packages that only some tests need, once per machine, and print their folder. They are no
# requirements of the tests, which skip without them.
#
#   bash scripts/test_packages.sh earth      # published encoders that MapSage's are compared with: 15 MB, seconds
#   bash scripts/test_packages.sh pyarrow    # for Parquet lists: 55 MB
#
#   MAPSAGE_ENVS     folder of the environments (default: ~/.cache/mapsage/envs)
#
# PyTorch, NumPy and huggingface_hub have the versions of the main leg.
# Exit status 2: another name. 5: the packages cannot be had on this machine.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
name=${1:-}
case $name in
    # Versions whose files tests/earth_oracles.py names. torchgeo and terratorch are loaded file by
    # file, and torchgeo's package asks for a newer Python than its file dofa.py needs.
    earth) packages=(olmoearth-pretrain-minimal==0.1.5 torchgeo==0.10.1 terratorch==1.2.13 timm==1.0.31
                     einops==0.8.2 universal-pathlib==0.3.10 pathlib-abc==0.5.2 fsspec==2026.9.0)
           options=(--ignore-requires-python) ;;
    pyarrow) packages=(pyarrow==26.0.1)
             options=(--only-binary :all:) ;;
    *) echo "error: unknown packages '$name': expected earth or pyarrow" >&2; exit 2 ;;
esac
folder=${MAPSAGE_ENVS:-${XDG_CACHE_HOME:-$HOME/.cache}/mapsage/envs}/$name-$(echo "${packages[@]}" | sha256sum | head -c 16)
if [ ! -d "$folder" ]; then
    python=$(bash "$root/scripts/setup_env.sh" main --dev)
    mkdir -p "$(dirname "$folder")"
    download=$(mktemp -d "$folder.XXXXXX")
    if ! timeout 300 "$python" -m pip install --quiet --no-deps --no-compile "${options[@]}" \
            --disable-pip-version-check --target "$download" "${packages[@]}" >&2; then
        rm -r "$download"
        echo "[test_packages] the packages could not be installed" >&2
        exit 5
    fi
    # Another process may have been faster.
    mv -T "$download" "$folder" 2>/dev/null || rm -r "$download"
fi
echo "$folder"
