"""The compiler of the operator: from a request of `hexa::moe_ffn` to the graphs that run on a device."""
