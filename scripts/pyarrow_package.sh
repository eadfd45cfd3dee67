#!/usr/bin/env bash
# Download pyarrow for the tests of Parquet lists, once per machine (55 MB), and print its folder. It is no
# requirement of the tests, because it would be the largest of them and serves three.
#
#   bash scripts/pyarrow_package.sh
#
#   MAPSAGE_ENVS     folder of the environments (default: ~/.cache/mapsage/envs)
#
# Exit status 5: the package cannot be had on this machine.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
package=pyarrow==26.0.1
folder=${MAPSAGE_ENVS:-${XDG_CACHE_HOME:-$HOME/.cache}/mapsage/envs}/${package/==/-}
if [ ! -d "$folder" ]; then
    python=$(bash "$root/scripts/setup_env.sh" main --dev)
    mkdir -p "$(dirname "$folder")"
    download=$(mktemp -d "$folder.XXXXXX")
    if ! timeout 300 "$python" -m pip install --quiet --no-deps --no-compile --only-binary :all: \
            --disable-pip-version-check --target "$download" "$package" >&2; then
        rm -r "$download"
        echo "[pyarrow_package] the package could not be installed" >&2
        exit 5
    fi
    # Another process may have been faster.
    mv -T "$download" "$folder" 2>/dev/null || rm -r "$download"
fi
echo "$folder"
