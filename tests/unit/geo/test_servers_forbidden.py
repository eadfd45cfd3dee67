"""Files that would make GDAL ask a server, and a process in which it asks none."""

from __future__ import annotations

import os
import re
import subprocess
import zipfile
from pathlib import Path
from typing import List, Optional, Set

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from range_server import RangeServer
from support import PATIENT, ROOT
from view_maps import write_raster
from warm_python import warm_python

from mapsage.geo import server_in
from mapsage.geo.vsi import size_in

URL = 'http://127.0.0.1:9/a.tif'
VRT = (
    '<VRTDataset rasterXSize="9" rasterYSize="9">{}<VRTRasterBand dataType="Byte" band="1">'
    '<SimpleSource><SourceFilename relativeToVRT="{}">{}</SourceFilename><SourceBand>1'
    '</SourceBand></SimpleSource></VRTRasterBand></VRTDataset>'
)
WMS = (
    '<GDAL_WMS><Service name="TMS"><ServerUrl>{}/${{z}}/${{x}}/${{y}}.png</ServerUrl></Service>'
    '<DataWindow><UpperLeftX>0</UpperLeftX><UpperLeftY>9</UpperLeftY><LowerRightX>9</LowerRightX>'
    '<LowerRightY>0</LowerRightY><TileLevel>3</TileLevel></DataWindow><Projection>EPSG:3857'
    '</Projection><BandsCount>3</BandsCount></GDAL_WMS>'
)


@pytest.mark.parametrize(
    'text, server',
    [
        (VRT.format('', 0, f'/vsicurl/{URL}'), f'/vsicurl/{URL}'),
        (VRT.format('', 0, URL), URL),
        (VRT.format('', 0, 's3://b/a.tif'), 's3://b/a.tif'),
        (VRT.format('', 0, '/vsizip//vsis3/b/a.zip/a.tif'), '/vsis3/b/a.zip/a.tif'),
        (VRT.format('', 0, '/vsigs_streaming/b/a.tif'), '/vsigs_streaming/b/a.tif'),
        (VRT.format('', 0, '&#104;ttp://127.0.0.1:9/a.tif'), URL),  # GDAL decodes such characters
        (VRT.format('', 0, f'<![CDATA[{URL}]]>'), f'{URL}]]'),
        (VRT.format('', 0, 'HTTP://h/a.tif'), 'HTTP://h/a.tif'),
        (
            VRT.format(
                f'<Metadata domain="GEOLOCATION"><MDI key="X_DATASET">{URL}</MDI></Metadata>',
                0,
                '/none',
            ),
            URL,
        ),
        ('\ufeff  \n' + WMS.format('http://h'), 'http://h/${z}/${x}/${y}.png'),
        ('{"assets": {"a": {"href": "https:\\/\\/h\\/a.tif"}}}', 'https://h/a.tif'),
        (VRT.format('<SRS>http://www.opengis.net/def/crs/EPSG/0/4326</SRS>', 0, '/none'), ''),
        (VRT.format('', 0, '/vsizip/a.zip/a.tif'), ''),
        (VRT.format('', 1, 'a.tif'), ''),
        ('II*\0 http://h/a.tif', ''),
        ('', ''),
        (' ', ''),
    ],
)
@pytest.mark.parametrize('suffix', ['.vrt', '.tif'])  # GDAL looks at the content
def test_a_server_in_a_file_is_found(text: str, server: str, suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f'a{suffix}'
    path.write_text(text, encoding='utf-8')
    assert server_in(str(path)) == server


@pytest.mark.parametrize(
    'text, inner',
    [
        ('<!--<SRS>-->' + VRT.format('', 0, URL) + '<!--</SRS>-->', None),
        (VRT.format('', 0, '<![CDATA[{inner}]]>'), 'inner.dat'),
        (VRT.format('', 0, '{inner}').replace('SourceFilename', 'sourcefilename'), 'inner.dat'),
        (VRT.format('', 0, 'vrt://{inner}?bands=1'), 'inner.dat'),
        (VRT.format('', 0, '/vsizip/{folder}/z.zip/i.vrt'), 'z.zip'),
        ('{{"features": [{{"href": "\\u0068ttp://127.0.0.1:9/a.tif"}}]}}', None),
    ],
)
def test_a_description_that_hides_a_server(text: str, inner: Optional[str], tmp_path: Path) -> None:
    path = tmp_path / 's.tif'
    path.write_text(text.format(inner=tmp_path / 'inner.dat', folder=tmp_path))
    if inner == 'z.zip':
        with zipfile.ZipFile(tmp_path / inner, 'w') as archive:
            archive.writestr('i.vrt', VRT.format('', 0, URL))
    elif inner:
        (tmp_path / inner).write_text(VRT.format('', 0, URL))
    assert server_in(str(path)) == URL


def test_a_mosaic_of_mosaics_that_contain_each_other(tmp_path: Path) -> None:
    (tmp_path / 'in').mkdir()
    (tmp_path / 'a.vrt').write_text(VRT.format('', 1, 'in/b.tif'))
    (tmp_path / 'in/b.tif').write_text(VRT.format('', 1, '../a.vrt'))
    assert server_in(str(tmp_path / 'a.vrt')) == ''
    (tmp_path / 'in/b.tif').write_text(VRT.format('', 1, '../c.vrt'))
    (tmp_path / 'c.vrt').write_text(VRT.format('', 0, URL))
    assert server_in(str(tmp_path / 'a.vrt')) == URL
    assert server_in(str(tmp_path / 'none')) == '' == server_in(str(tmp_path))


OPEN = """
import sys
import warnings
import rasterio
from mapsage.geo import forbid_servers
from mapsage.geo.gdal_files import open_file
warnings.simplefilter('ignore')
if sys.argv[1] == 'forbid':
    with rasterio.Env():  # it may have been used before
        forbid_servers()
for name in sys.argv[2:]:
    try:
        with open_file(name) as source:
            source.read(1)
            source.overviews(1)
            source.read(1, out_shape=(2, 2))
    except Exception as error:
        print(name, error)
"""


def test_no_server_is_asked_in_such_a_process(tmp_path: Path, server: RangeServer) -> None:
    url = f'{server.url}/gone'
    names: List[str] = [
        f'{url}/1.tif',
        f'/vsicurl/{url}/2.tif',
        f'/vsicurl_streaming/{url}/3.tif',
        f'/vsizip//vsicurl/{url}/4.zip/a.tif',
        '/vsis3/gone/5.tif',
        f'WMS:{url}/6',
        f'WMTS:{url}/7',
        f'WCS:{url}/8',
        f'STACIT:"{url}/9"',
        f'vrt://{url}/10.tif?bands=1',
    ]
    for name, text in (
        ('11.tif', WMS.format(f'{url}/11')),
        ('12.vrt', VRT.format('', 0, f'{url}/12.tif')),
        ('13.tif', VRT.format('', 0, f'/vsicurl/{url}/13.tif')),
    ):
        (tmp_path / name).write_text(text)
        names.append(str(tmp_path / name))
    # of files that hold pixels alone, what lies next to them
    overview = (
        '<PAMDataset><Metadata domain="OVERVIEWS"><MDI key="OVERVIEW_FILE">/vsicurl/'
        f'{url}/14.tif</MDI></Metadata></PAMDataset>'
    )
    for number, suffix, text in ((14, '.aux.xml', overview), (15, '.ovr', WMS.format(f'{url}/15'))):
        path = tmp_path / f'{number}.tif'
        write_raster(path, np.zeros((1, 64, 64), np.uint8), None, None)
        Path(f'{path}{suffix}').write_text(text)
        names.append(str(path))
    script = tmp_path / 'open.py'
    script.write_text(OPEN)
    environment = dict(
        os.environ,
        AWS_S3_ENDPOINT=server.address,
        AWS_HTTPS='NO',
        AWS_NO_SIGN_REQUEST='YES',
        AWS_VIRTUAL_HOSTING='FALSE',
        PYTHONPATH=str(ROOT),
    )

    def asked_for(how: str) -> Set[int]:
        """Return the numbers of the names that make requests."""
        before = len(server.requests())
        subprocess.run(
            [warm_python(), str(script), how, *names],
            check=True,
            env=environment,
            timeout=PATIENT,
            stdout=subprocess.PIPE,
        )
        return {
            int(number)
            for line in server.requests()[before:]
            for number in re.findall(r'/gone/(\d+)', line)
        }

    assert asked_for('forbid') == set()
    assert asked_for('allow') >= {*range(1, 15)}


@given(st.one_of(st.text(), st.sampled_from(['9' * 5000, '²', '٣', '-1', '1e3', 'bytes 0-1/7'])))
def test_any_size_that_a_server_says(text: str) -> None:
    for name in ('content-range', 'content-length'):
        size = size_in({name: text})
        assert size is None or 0 <= size < 10**18
