"""Check for environment variables that contradict the run, or that no software reads."""
from __future__ import annotations

from dataclasses import dataclass
from typing import Iterator, List, Mapping, Optional

from mapsage.accelerator import Accelerator


@dataclass(frozen=True)
class Finding:
    """One line of the doctor's report.

    Attributes:
        level: ``'ok'``; ``'no'`` for what is absent and not needed; ``'note'`` for what is worth
            knowing; or ``'problem'`` for what would keep a training from starting.
        text: Description of what was found.
        next_step: Advice on what to do about it; empty if there is nothing to do.
    """

    level: str
    text: str
    next_step: str = ''

    def __str__(self) -> str:
        arrow = f'\n             -> {self.next_step}' if self.next_step else ''
        return f'  {self.level:<8} {self.text}{arrow}'


# Variables that training scripts for Enflame cards set, but that none of Enflame's sources reads
# (torch_gcu 1.10 and 2.10, ModelZoo, vllm-gcu). The values say what to use instead.
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


def check_environment(environ: Mapping[str, str], accelerator: Optional[Accelerator],
                      launcher: str = 'none') -> List[Finding]:
    """Return what is wrong or misleading in ``environ``; empty if nothing is.

    The launcher's variables are not checked here but by
    :func:`mapsage.distributed.resolve_strategy`.

    Args:
        environ: Environment of the process.
        accelerator: Accelerator of the run, or None if there is none.
        launcher: Name of the launcher that has started this process.
    """
    findings: List[Finding] = []
    if accelerator is not None:
        findings += _masks(environ, accelerator, launcher)
    for name, instead in _UNREAD.items():
        if name in environ:
            findings.append(Finding(
                'note', f'{name}={environ[name]}: no Enflame software that we know reads this',
                f'unset it; {instead}'))
    if 'ENFLAME_VISIBLE_DEVICES' in environ:
        findings.append(Finding(
            'note', f"ENFLAME_VISIBLE_DEVICES={environ['ENFLAME_VISIBLE_DEVICES']}: read by the "
            f'container runtime only', 'inside the container TOPS_VISIBLE_DEVICES hides devices'))
    if launcher == 'none':
        for name, option in _SCRIPTS_ONLY.items():
            if environ.get(name):
                findings.append(Finding('note', f'{name}={environ[name]}: for scripts/*.sh only',
                                        f'give {option} {environ[name]} here'))
    if accelerator is not None and accelerator.simulated and environ.get('MAPSAGE_SIM_FAULTS'):
        findings.append(Finding(
            'note', f"MAPSAGE_SIM_FAULTS={environ['MAPSAGE_SIM_FAULTS']}: the simulator will fail "
            f'on purpose', 'unset it to train'))
    return findings


def _masks(environ: Mapping[str, str], accelerator: Accelerator,
           launcher: str) -> Iterator[Finding]:
    per_node = environ.get('LOCAL_WORLD_SIZE', '1')
    ranks = int(per_node) if launcher != 'none' and per_node.isdecimal() else 1
    for name in accelerator.masks:
        if name not in environ:
            continue
        shown = [part.strip() for part in environ[name].split(',') if part.strip()]
        if len(set(shown)) < len(shown):
            yield Finding('problem', f'{name}={environ[name]} names a device twice',
                          'name each once')
        elif len(shown) == 1 < ranks:
            yield Finding('ok', f'{name}={environ[name]} shows this rank one card, which no other '
                          f'rank of this machine may have')
        elif len(shown) < ranks:
            yield Finding(
                'problem', f'{name}={environ[name]} shows {len(shown)} device(s) to each of the '
                f'{ranks} ranks of this machine',
                f'name {ranks} devices, unset it, or start NPROC_PER_NODE={max(1, len(shown))}')
        else:
            yield Finding('ok', f'{name}={environ[name]}')
