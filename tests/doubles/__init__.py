"""Stand-ins for what no machine here has. Reached through PYTHONPATH, by tests alone."""

from pathlib import Path

# What a process needs to find the T20's torch_gcu. XLA's CPU code is compiled fast, not well.
T20 = {'PYTHONPATH': str(Path(__file__).parent), 'XLA_FLAGS': '--xla_backend_optimization_level=0'}

# Devices whose plugins have a double in makes/.
MAKES = ('npu', 'mlu', 'musa', 'flagos')


def make(device_type: str) -> dict:
    """Return what a process needs to find the double of a make's plugin, such as ``'npu'``."""
    folder = Path(__file__).parent / 'makes'
    return {'PYTHONPATH': f'{folder / device_type}:{folder}'}


# What a process needs to find the double of the S60 line's torch_gcu.
S60 = {'PYTHONPATH': str(Path(__file__).parent / 's60')}
