"""The experiments of the HEXA-MoE paper on Swin-Transformer-MoE: tables, figures, ablations (docs/swin_moe.md)."""
