"""Make a class map from embeddings and a few labels, with scores from spatial cross-validation.

The program is mapsage/extras/embeddings/classify.py.
"""

from _program import run

if __name__ == '__main__':
    run('mapsage.extras.embeddings.classify')
