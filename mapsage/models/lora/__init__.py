"""Low-rank adapters (LoRA) for the attention and linear layers of a vision transformer.

:func:`add_lora` changes a backbone in place, so the names in its state dict stay valid and
pretrained weights load as before; :func:`merge_lora` undoes it for the export. ``adapted.py`` has
the layers, ``inject.py`` chooses which layers to adapt.
"""

from .adapted import LoRAError, LoRASettings, is_adapter, parse_lora
from .inject import (
    add_lora,
    build_lora_backbone,
    describe_lora,
    merge_lora,
)

__all__ = [
    'LoRAError',
    'LoRASettings',
    'add_lora',
    'build_lora_backbone',
    'describe_lora',
    'is_adapter',
    'merge_lora',
    'parse_lora',
]
