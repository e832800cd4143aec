"""What `HexaConfig` asks of finished blocks: their `hexa::moe_ffn` nodes become other operators or take other arguments."""
