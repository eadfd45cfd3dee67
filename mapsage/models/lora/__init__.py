"""Low-rank adapters (LoRA) for the attention and linear layers of a vision transformer."""
from .adapted import is_adapter
from .backbone import build_lora_backbone
from .inject import add_lora, describe_lora, merge_lora
from .settings import LoRAError, LoRASettings, parse_lora

__all__ = [
    'LoRAError', 'LoRASettings', 'add_lora', 'build_lora_backbone', 'describe_lora', 'is_adapter',
    'merge_lora', 'parse_lora'
]
