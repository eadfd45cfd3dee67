"""Classifiers of vectors: linear probe, nearest neighbors, random forest, by scikit-learn.

Each is fitted in seconds on up to thousands of labeled vectors, always to the same result.
"""

from __future__ import annotations

import warnings
from typing import Any, Tuple

import numpy as np

from .errors import EmbeddingError

METHODS = ('probe', 'knn', 'forest')
# As in the k-nearest-neighbor evaluation of few labels: a small odd number.
_NEIGHBORS = 5
_TREES = 200
# Vectors that nearest neighbors are found for at a time; their distances take 8 bytes a label.
_CHUNK = 1 << 16
# Inverse strength of the probe's regularization, for components of variance 1 on average; chosen
# on made aerial scenes, where 0.01 to 10 differ by a point of mIoU.
_PROBE_C = 0.1


class Classifier:
    """A fitted classifier.

    Args:
        method: One of :data:`METHODS`.
        vectors: ``(N, C)`` float32 of unit length.
        labels: Index of the class of each vector, ``(N,)``.
        classes: Number of classes; some may be missing in ``labels``.

    Raises:
        EmbeddingError: If scikit-learn is not installed.
    """

    def __init__(self, method: str, vectors: np.ndarray, labels: np.ndarray, classes: int) -> None:
        self._classes, self._present = classes, np.unique(labels)
        # One scale for all components: the last principal components, which vary least, are noise.
        self._mean = vectors.mean(0)
        self._scale = max(float((vectors - self._mean).std()), 1e-6)
        self._method = method
        if len(self._present) == 1:
            self._model: Any = None
            return
        self._model = _build(method, len(labels))
        inputs = self._scaled(vectors) if method == 'probe' else vectors
        with warnings.catch_warnings():
            # The probe is good enough before it has converged to the last digit.
            warnings.simplefilter('ignore')
            self._model.fit(inputs, labels)

    def linear(self) -> Tuple[np.ndarray, np.ndarray]:
        """Return the probe's weights (classes, C) and biases, whose softmax it predicts; float32.

        All classes must have had a label.
        """
        weights, biases = self._model.coef_, self._model.intercept_
        if len(self._present) == 2:
            # scikit-learn has the logit of the second class against the first.
            weights, biases = (np.concatenate([0 * part, part]) for part in (weights, biases))
        weights = weights / self._scale
        return weights.astype(np.float32), (biases - weights @ self._mean).astype(np.float32)

    def _scaled(self, vectors: np.ndarray) -> np.ndarray:
        return (vectors - self._mean) / self._scale

    def probabilities(self, vectors: np.ndarray) -> np.ndarray:
        """Return the probability of each class, ``(N, classes)`` float32, for (N, C) vectors."""
        result = np.zeros((len(vectors), self._classes), np.float32)
        if self._model is None:
            result[:, self._present] = 1
            return result
        for first in range(0, len(vectors), _CHUNK):
            chunk = vectors[first : first + _CHUNK]
            if self._method == 'probe':
                chunk = self._scaled(chunk)
            result[first : first + len(chunk), self._present] = self._model.predict_proba(chunk)
        return result

    def predict(self, vectors: np.ndarray) -> Tuple[np.ndarray, np.ndarray]:
        """Return the most probable class of each vector, and its probability."""
        scores = self.probabilities(vectors)
        best = scores.argmax(1)
        return best, scores[np.arange(len(best)), best]


def _build(method: str, count: int) -> Any:
    try:
        from sklearn.ensemble import RandomForestClassifier
        from sklearn.linear_model import LogisticRegression
        from sklearn.neighbors import KNeighborsClassifier
    except ImportError as error:
        raise EmbeddingError(
            f'mapsage classify needs scikit-learn: pip install "mapsage[embeddings]" or '
            f'scikit-learn ({error}).'
        ) from error
    if method == 'probe':
        return LogisticRegression(C=_PROBE_C, max_iter=1000)
    if method == 'knn':
        # Of vectors of length 1, the nearest are also those of the smallest angle.
        return KNeighborsClassifier(min(_NEIGHBORS, count), weights='distance', algorithm='brute')
    return RandomForestClassifier(_TREES, random_state=0, n_jobs=-1, class_weight='balanced')
