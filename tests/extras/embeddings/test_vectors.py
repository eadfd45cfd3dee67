"""Vectors of 8 bits as others publish them, their means, and principal components."""

from __future__ import annotations

import numpy as np
import pytest
from embedding_runs import unit_vectors

from mapsage.extras.embeddings.errors import EmbeddingError
from mapsage.extras.embeddings.vectors import Pca, dequantize, halve, quantize, to_unit


def test_the_scheme_is_the_published_one() -> None:
    """AlphaEarth's inverse is ((q / 127.5) ** 2) * sign(q); OlmoEarth writes what it inverts."""
    every = np.arange(-127, 128).astype(np.int8)
    published = ((every / 127.5) ** 2) * np.sign(every)
    np.testing.assert_allclose(dequantize(every), published, rtol=1e-6)
    # A value is a fixed point of both functions.
    np.testing.assert_array_equal(quantize(dequantize(every)), every)
    values = np.linspace(-1, 1, 4001).astype(np.float32)
    olmo = (np.sqrt(np.abs(values)) * np.sign(values) * 127.5).clip(-127, 127).round()
    np.testing.assert_array_equal(quantize(values), olmo.astype(np.int8))
    assert quantize(np.float32([1, -1, 0])).tolist() == [127, -127, 0]


@pytest.mark.parametrize('dims', [3, 64, 768, 2000])
def test_8_bits_keep_the_direction(dims: int) -> None:
    vectors = unit_vectors(np.random.RandomState(0), dims, 500)
    cosine = (to_unit(dequantize(quantize(vectors))) * vectors).sum(0)
    assert cosine.min() > 0.999


def test_half_the_resolution_is_the_mean_of_unit_length() -> None:
    random = np.random.RandomState(0)
    stored = quantize(unit_vectors(random, 5, 7, 9))
    stored[:, 2:4, 4:6] = -128
    stored[:, 0, 0] = -128
    halved = halve(stored)
    assert halved.shape == (5, 4, 5) and (halved[:, 1, 2] == -128).all()
    values = np.where(stored == -128, np.nan, dequantize(stored))
    for row, column in ((0, 0), (0, 1), (3, 4), (3, 0)):
        box = values[:, 2 * row : 2 * row + 2, 2 * column : 2 * column + 2].reshape(5, -1)
        mean = np.nanmean(box, 1)
        expected = mean / np.linalg.norm(mean)
        np.testing.assert_allclose(dequantize(halved)[:, row, column], expected, atol=0.01)


def test_components_are_those_of_scikit_learn() -> None:
    decomposition = pytest.importorskip('sklearn.decomposition')
    random = np.random.RandomState(0)
    vectors = (random.standard_normal((400, 6)) @ random.standard_normal((6, 20))).astype('f4')
    # Of very different size, and one that is always 0.
    vectors *= np.geomspace(0.01, 100, 20).astype('f4')
    vectors[:, 3] = 0
    sizes = np.sqrt((vectors**2).mean(0))
    divided = vectors / np.sqrt(np.maximum(sizes, 1e-3 * sizes.max()))
    pca = Pca.fit(vectors, 4, '400 vectors')
    theirs = decomposition.TruncatedSVD(4, algorithm='arpack').fit(divided)
    projected, expected = vectors @ pca.components, theirs.transform(divided)
    signs = np.sign((projected * expected).sum(0))
    np.testing.assert_allclose(projected * signs, expected, rtol=1e-3, atol=1e-3)
    assert pca.explained == pytest.approx((projected**2).sum() / (divided**2).sum(), abs=1e-4)
    # The sign of a component does not depend on the LAPACK at hand.
    assert (pca.components[np.abs(pca.components).argmax(0), range(4)] > 0).all()
    again = Pca.from_dict(pca.to_dict(), 'x')
    np.testing.assert_array_equal(again.components, pca.components)
    assert again.key() == pca.key() != Pca.fit(vectors[:300], 4, '').key()


def test_a_component_that_was_0_in_the_sample_does_not_decide_later() -> None:
    vectors = np.random.RandomState(0).standard_normal((50, 8)).astype('f4')
    vectors[:, 5] = 0
    pca = Pca.fit(vectors, 8, '')
    before = to_unit(vectors[0] @ pca.components)
    vectors[0, 5] = 1e-3
    assert before @ to_unit(vectors[0] @ pca.components) > 0.999
    assert np.isfinite(Pca.fit(0 * vectors, 8, '').components).all()


def test_what_is_no_set_of_components_is_refused() -> None:
    vectors = np.random.RandomState(0).standard_normal((9, 20)).astype('f4')
    with pytest.raises(EmbeddingError, match='--dims 10: .* 20 components.* at most 9'):
        Pca.fit(vectors, 10, '')
    good = Pca.fit(vectors, 3, '').to_dict()
    nan = Pca(np.full((20, 3), np.nan, np.float32), 1.0, '').to_dict()
    for broken in (
        {},
        dict(good, components='!'),
        dict(good, dims=7),
        dict(good, dims=[]),
        dict(good, components=''),
        dict(good, components=3),
        dict(good, explained=[]),
        nan,
    ):
        with pytest.raises(EmbeddingError, match='a.tif holds no principal components'):
            Pca.from_dict(broken, 'a.tif')
