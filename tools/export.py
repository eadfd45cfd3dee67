"""Write a trained model as one ONNX file for QGIS, Enflame's runtimes, or anything that reads ONNX.

The program is mapsage/extras/export/export.py.
"""

from _program import run

if __name__ == '__main__':
    run('mapsage.extras.export.export')
