"""Write the features of an encoder as maps of vectors: embeddings of scenes of any size.

The program is mapsage/extras/embeddings/embed.py.
"""

from _program import run

if __name__ == '__main__':
    run('mapsage.extras.embeddings.embed')
