"""Take LoRA adapters out of a checkpoint: merged into the weights, or as files of peft.

The program is mapsage/commands/export_lora.py.
"""

from _program import run

if __name__ == '__main__':
    run('mapsage.commands.export_lora')
