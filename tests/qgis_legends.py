"""Read layers with QGIS, without a screen, and print their legends as JSON.

Run by the Python that QGIS belongs to, which knows neither MapSage nor the tests: ``qgis_legends.py
FILE...``. A file may be ``map.gpkg|layername=map``.
"""

import json
import os
import sys

os.environ['QT_QPA_PLATFORM'] = 'offscreen'

from qgis.core import QgsApplication, QgsRasterLayer, QgsVectorLayer  # noqa: E402


def legend_of(source):
    """Return the kind of renderer and [label, color] of each legend entry.

    Of polygons also: how many features there are and how many of them are drawn, the CRS, the
    attributes of the first feature, and how its symbol is filled and outlined.
    """
    if '.gpkg' in source:
        layer = QgsVectorLayer(source, 'layer', 'ogr')
        assert layer.isValid(), source
        renderer = layer.renderer()
        entries = [
            (each.label(), each.symbol().color().name()) for each in renderer.legendSymbolItems()
        ]
        first = next(layer.getFeatures(), None)
        drawn = (
            sum(
                renderer.categoryIndexForValue(feature[renderer.classAttribute()]) >= 0
                for feature in layer.getFeatures()
            )
            if hasattr(renderer, 'categories')
            else 0
        )
        items = renderer.legendSymbolItems()  # own the symbols, which own their layers
        symbol = items[0].symbol().symbolLayer(0).properties()
        return dict(
            kind=renderer.type(),
            drawn=drawn,
            features=layer.featureCount(),
            entries=entries,
            crs=layer.crs().authid(),
            attributes={name: first[name] for name in layer.fields().names()}
            if first is not None
            else {},
            fill=symbol.get('style'),
            outline=symbol.get('outline_width'),
        )
    layer = QgsRasterLayer(source, 'layer')
    assert layer.isValid(), source
    return dict(
        kind=layer.renderer().type(),
        entries=[(label, color.name()) for label, color in layer.renderer().legendSymbologyItems()],
    )


if __name__ == '__main__':
    application = QgsApplication([], False)
    application.initQgis()
    print(json.dumps([legend_of(source) for source in sys.argv[1:]], default=str))
    sys.stdout.flush()
    os._exit(0)  # QGIS may crash as it ends
