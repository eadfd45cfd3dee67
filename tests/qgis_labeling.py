"""Label points with QGIS, without a screen, as a user does in the layer's attribute table.

Run by the Python that QGIS belongs to: ``qgis_labeling.py POINTS.gpkg LABELS.json``. The labels are
a dict from the number of a point to its class. Prints how many points QGIS changed.
"""

import json
import os
import sys

os.environ['QT_QPA_PLATFORM'] = 'offscreen'

from qgis.core import QgsApplication, QgsVectorLayer, edit  # noqa: E402


def label(path, labels):
    """Set the field ``reference`` of points, commit the changes, and return their number."""
    layer = QgsVectorLayer(path + '|layername=points', 'points', 'ogr')
    assert layer.isValid(), path
    form = layer.editorWidgetSetup(layer.fields().indexOf('reference'))
    assert form.type() == 'ValueMap', form.type()
    choices = [value for entry in form.config()['map'] for value in entry.values()]
    changed = 0
    with edit(layer):
        for feature in layer.getFeatures():
            name = labels.get(str(feature['point']))
            if name is not None:
                assert name in choices, (name, choices)
                feature['reference'] = name
                changed += layer.updateFeature(feature)
    return changed


if __name__ == '__main__':
    application = QgsApplication([], False)
    application.initQgis()
    with open(sys.argv[2], encoding='utf-8') as file:
        print(label(sys.argv[1], json.load(file)))
    sys.stdout.flush()
    os._exit(0)  # QGIS may crash as it ends
