"""PEFT's LoRA on the linear layers of listed experts, handed to a rewritten block as factors.

The core does not import this package. A specialisation asks `hexa_fx.registry.lora` for what is around the layers that it reads.
"""

from hexa_fx.lora.linear import LinearLora, taken_off

__all__ = ["LinearLora", "taken_off"]
