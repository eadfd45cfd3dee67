#!/usr/bin/env bash
# Install what MapSage needs into the Python of an image, and leave the packages of the base as they
# are: a vendor's PyTorch does not survive an upgrade of itself or of what it was built with.
#
#   bash docker/install.sh REQUIREMENTS_FILE
#
# A base without torch gets that of the file. Where the base has a package in a version that the file
# cannot use, pip ends with both versions, and nothing of the base is changed.
set -euo pipefail

requirements=${1:?docker/install.sh needs a file of requirements}
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=${MAPSAGE_PYTHON:-python3}
base=$(mktemp)
wanted=$(mktemp)

# Names and versions of what the base has; pip's own tools may change, and a package that was
# installed from a file has a name alone.
"$python" - >"$base" <<'END'
from importlib import metadata
found = {each.metadata['Name']: each.version for each in metadata.distributions() if each.metadata['Name']}
for name, version in sorted(found.items()):
    if name.lower() not in ('pip', 'setuptools', 'wheel'):
        print(f'{name}=={version}')
END
if torch=$("$python" -c 'import torch; print(torch.__version__)' 2>/dev/null); then
    echo "the base has torch $torch, which stays"
    grep -vE '^torch(_xla)?==' "$requirements" >"$wanted"
else
    cp "$requirements" "$wanted"
fi
MMCV_WITH_OPS=0 "$python" -m pip install --no-cache-dir -r "$wanted" -c "$base"
"$python" -m pip install --no-cache-dir --no-deps "$root"
rm "$base" "$wanted"
"$python" -c 'import mapsage; print("MapSage", mapsage.__version__)'
