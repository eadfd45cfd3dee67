"""The manifests of docs/how-to/engines.md agree with the published schemas."""

from __future__ import annotations

import re
from typing import Any, Dict, List

import pytest
import yaml
from support import ROOT, main_leg

pytestmark = main_leg
PAGE = ROOT / 'docs' / 'how-to' / 'engines.md'


def manifests() -> List[Dict[str, Any]]:
    return [
        yaml.safe_load(text) for text in re.findall(r'```yaml\n(.*?)```', PAGE.read_text(), re.S)
    ]


def manifest_of(kind: str) -> Dict[str, Any]:
    return next(manifest for manifest in manifests() if manifest.get('kind') == kind)


def left_out(document: Any, accepted: Any, path: str = '') -> List[str]:
    """Return the places of a document that a schema's model has dropped."""
    if isinstance(document, dict):
        return [
            place
            for key, value in document.items()
            for place in (
                left_out(value, accepted[key], f'{path}.{key}')
                if isinstance(accepted, dict) and key in accepted
                else [f'{path}.{key}']
            )
        ]
    if isinstance(document, list):
        return [
            place
            for position, value in enumerate(document)
            for place in left_out(value, accepted[position], f'{path}[{position}]')
        ]
    return [] if document == accepted else [f'{path}: {document!r} is {accepted!r}']


def test_the_train_job_is_one_of_kubeflows_trainer() -> None:
    models = pytest.importorskip('kubeflow_trainer_api.models')
    manifest = manifest_of('TrainJob')
    # The package's model of a quantity takes no text, as Kubernetes does.
    limits = manifest['spec']['trainer']['resourcesPerNode'].pop('limits')
    assert all(isinstance(value, str) for value in limits.values())
    job = models.TrainerV1alpha1TrainJob.model_validate(manifest)
    assert left_out(manifest, job.model_dump(by_alias=True, mode='json', exclude_none=True)) == []
    # A word that the schema does not know is found.
    manifest['spec']['trainer']['numNode'] = 2
    job = models.TrainerV1alpha1TrainJob.model_validate(manifest)
    accepted = job.model_dump(by_alias=True, mode='json', exclude_none=True)
    assert left_out(manifest, accepted) == ['.spec.trainer.numNode']


def test_the_pytorch_job_is_one_of_the_training_operator() -> None:
    training = pytest.importorskip('kubeflow.training.models')
    kubernetes = pytest.importorskip('kubernetes.client')
    manifest = manifest_of('PyTorchJob')

    def check(document: Any, kind: str) -> None:
        """Compare the keys of a document with the attributes of its model, and so on below."""
        container = re.match(r'(list|dict)[\[(](?:str, )?(.+?)[\])]$', kind)
        if container:
            values = document.values() if container.group(1) == 'dict' else document
            for value in values:
                check(value, container.group(2))
            return
        model = getattr(training, kind, None) or getattr(kubernetes, kind, None)
        if model is None:
            return
        kinds = {name: model.openapi_types[key] for key, name in model.attribute_map.items()}
        assert set(document) <= set(kinds), f'{kind}: {set(document) - set(kinds)}'
        for key, value in document.items():
            check(value, kinds[key])

    check(manifest, 'KubeflowOrgV1PyTorchJob')
    assert set(manifest['spec']['pytorchReplicaSpecs']) == {'Master', 'Worker'}
    manifest['spec']['pytorchReplicaSpecs']['Worker']['template']['spec']['container'] = []
    with pytest.raises(AssertionError, match='V1PodSpec: .*container'):
        check(manifest, 'KubeflowOrgV1PyTorchJob')


def test_the_scripts_of_the_manifests_exist() -> None:
    for kind in ('TrainJob', 'PyTorchJob'):
        assert 'scripts/start_8card_training.sh' in str(manifest_of(kind))
    task = next(manifest for manifest in manifests() if 'num_nodes' in manifest)
    for line in (task['setup'], task['run']):
        assert (ROOT / line.split()[1]).exists()
