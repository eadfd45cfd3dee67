"""Embeddings: the features of any encoder as maps of vectors, and class maps from a few labels.

`embedding_maps.py` computes them (`encoder.py` runs the model, `blending.py` joins windows), and
`embedding_file.py` writes and reads their files, also those of AlphaEarth and TESSERA.
`classification.py` makes class maps from them: `labels.py` finds labeled cells, `classifiers.py` fits,
`cross_validation.py` scores.
"""

from mapsage_launcher.only_help import is_only_help

# The help of a program needs none of these.
if not is_only_help():
    from .embedding_file import EmbeddingFile, read_embeddings
    from .errors import EmbeddingError
    from .vectors import dequantize, quantize

__all__ = ['EmbeddingError', 'EmbeddingFile', 'dequantize', 'quantize', 'read_embeddings']
