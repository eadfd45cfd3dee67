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
    """Return the kind of renderer and [label, color] of each legend entry."""
    if '.gpkg' in source:
        layer = QgsVectorLayer(source, 'layer', 'ogr')
        assert layer.isValid(), source
        renderer = layer.renderer()
        entries = [(each.label(), each.symbol().color().name())
                   for each in renderer.legendSymbolItems()]
        drawn = sum(renderer.categoryIndexForValue(feature[renderer.classAttribute()]) >= 0
                    for feature in layer.getFeatures()) if hasattr(renderer, 'categories') else 0
        return dict(kind=renderer.type(), drawn=drawn, features=layer.featureCount(),
                    entries=entries)
    layer = QgsRasterLayer(source, 'layer')
    assert layer.isValid(), source
    return dict(kind=layer.renderer().type(), entries=[
        (label, color.name()) for label, color in layer.renderer().legendSymbologyItems()])


if __name__ == '__main__':
    application = QgsApplication([], False)
    application.initQgis()
    print(json.dumps([legend_of(source) for source in sys.argv[1:]]))
    sys.stdout.flush()
    os._exit(0)  # QGIS may crash as it ends
