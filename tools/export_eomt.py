"""Write a trained EoMT as a folder that Hugging Face's transformers reads.

The program is mapsage/extras/mask_transformers/export_eomt.py.
"""

from _program import run

if __name__ == '__main__':
    run('mapsage.extras.mask_transformers.export_eomt')
