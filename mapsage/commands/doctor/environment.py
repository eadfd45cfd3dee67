"""Environment variables that contradict the run, or that no software reads.

The launcher's variables are not checked here but by `mapsage.distributed.resolve_strategy`.
"""

from __future__ import annotations

from typing import Iterator, List, Mapping, Optional

from mapsage.accelerator import Accelerator

from .finding import Finding

# Variables that training scripts for Enflame cards set, but that none of Enflame's sources reads
# (torch_gcu 1.10 and 2.10, ModelZoo, vllm-gcu), and what to use instead.
_UNREAD = {
    'GCU_VISIBLE_DEVICES': 'TOPS_VISIBLE_DEVICES hides devices',
    'GCU_DEVICE_COUNT': 'NPROC_PER_NODE says how many ranks start',
    'GCU_DISABLE_AMP': 'AMP is off unless --amp or AmpOptimWrapper asks for it',
    'GCU_MEMORY_FRACTION': 'a smaller batch needs less memory',
    'ECCL_BACKEND': 'env_cfg.dist_cfg.backend chooses the backend',
    'ECCL_DEVICE_TYPE': 'env_cfg.accelerator or ACCELERATOR chooses the device',
    'PTEX_DDP_BACKEND': 'env_cfg.dist_cfg.backend chooses the backend',
}
# Variables that scripts/*.sh read and Python programs do not, and the options to use instead.
_SCRIPTS_ONLY = {'ACCELERATOR': '--accelerator', 'WORK_DIR': '--work-dir'}


def check_environment(
    environ: Mapping[str, str], accelerator: Optional[Accelerator], launcher: str = 'none'
) -> List[Finding]:
    """Return wrong or misleading variables; empty if there are none.

    Args:
        environ: Environment of the process.
        accelerator: Accelerator of the run, or None if no accelerator can be used.
        launcher: Name of the launcher that has started this process.
    """
    findings: List[Finding] = []
    if accelerator is not None:
        findings += _check_masks(environ, accelerator, launcher)
        problem = accelerator.environment_problem(environ)
        if problem is not None:
            findings.append(Finding('problem', problem))
    for name, instead in _UNREAD.items():
        if name in environ:
            findings.append(
                Finding(
                    'note',
                    f'{name}={environ[name]}: no Enflame software that we know reads this',
                    f'unset it; {instead}',
                )
            )
    if 'ENFLAME_VISIBLE_DEVICES' in environ:
        findings.append(
            Finding(
                'note',
                f'ENFLAME_VISIBLE_DEVICES={environ["ENFLAME_VISIBLE_DEVICES"]}: read by the '
                f'container runtime only',
                'inside the container TOPS_VISIBLE_DEVICES hides devices',
            )
        )
    if launcher == 'none':
        for name, option in _SCRIPTS_ONLY.items():
            if environ.get(name):
                findings.append(
                    Finding(
                        'note',
                        f'{name}={environ[name]}: for scripts/*.sh only',
                        f'give {option} {environ[name]} here',
                    )
                )
    if accelerator is not None and accelerator.simulated and environ.get('MAPSAGE_SIM_FAULTS'):
        findings.append(
            Finding(
                'note',
                f'MAPSAGE_SIM_FAULTS={environ["MAPSAGE_SIM_FAULTS"]}: the simulator will fail '
                f'on purpose',
                'unset it to train',
            )
        )
    return findings


def _check_masks(
    environ: Mapping[str, str], accelerator: Accelerator, launcher: str
) -> Iterator[Finding]:
    """Yield a finding for each variable that hides devices from the ranks of this machine."""
    per_node = environ.get('LOCAL_WORLD_SIZE', '1')
    ranks = int(per_node) if launcher != 'none' and per_node.isdecimal() else 1
    for name in accelerator.masks:
        if name not in environ:
            continue
        devices = [device.strip() for device in environ[name].split(',') if device.strip()]
        if len(set(devices)) < len(devices):
            yield Finding(
                'problem', f'{name}={environ[name]} names a device twice', 'name each once'
            )
        elif len(devices) == 1 < ranks:
            yield Finding(
                'ok',
                f'{name}={environ[name]} shows this rank one card, which no other '
                f'rank of this machine may have',
            )
        elif len(devices) < ranks:
            yield Finding(
                'problem',
                f'{name}={environ[name]} shows {len(devices)} device(s) to each of the '
                f'{ranks} ranks of this machine',
                f'name {ranks} devices, unset it, or start NPROC_PER_NODE={max(1, len(devices))}',
            )
        else:
            yield Finding('ok', f'{name}={environ[name]}')
