"""What the paper reports, to stand beside our numbers: its tables of memory and latency, and what its figures say."""

from __future__ import annotations

MEMORY = {
    "base": {
        "Tutel": (12.7, 13.9, 15.3, 16.0, 17.4, 19.0, 20.3, 21.8),
        "MegaBlocks (MoE)": (13.1, 13.8, 14.8, 15.4, 16.0, 16.9, 17.8, 18.7),
        "MegaBlocks (dMoE)": (12.9, 13.7, 14.9, 15.6, 16.7, 17.8, 18.6, 19.7),
        "HEXA-MoE (data-centric)": (10.9, 11.2, 11.3, 11.7, 12.0, 12.0, 12.3, 12.4),
        "HEXA-MoE (model-centric)": (10.0, 10.2, 10.3, 10.6, 10.5, 10.7, 10.9, 11.4),
    },
    "small": {
        "Tutel": (9.0, 10.0, 11.0, 11.6, 12.7, 13.8, 15.0, 16.0),
        "MegaBlocks (MoE)": (9.2, 9.8, 10.2, 10.8, 11.2, 11.8, 12.5, 13.0),
        "MegaBlocks (dMoE)": (9.0, 9.7, 10.4, 11.4, 12.0, 12.4, 13.3, 13.9),
        "HEXA-MoE (data-centric)": (8.1, 8.3, 8.2, 8.5, 8.6, 8.7, 9.0, 9.2),
        "HEXA-MoE (model-centric)": (7.7, 7.8, 7.8, 8.0, 7.9, 8.2, 8.3, 8.5),
    },
}
"""GB a device, top-1 to top-8; two RTX 4090, 8 experts, batch 40."""

LATENCY = {
    "base": {
        "Tutel": (2.40, 2.66, 2.54, 2.18),
        "MegaBlocks (MoE)": (2.43, 2.49, 2.17, 2.03),
        "MegaBlocks (dMoE)": (2.19, 2.55, 2.41, 2.12),
        "HEXA-MoE (data-centric)": (0.99, 1.16, 1.30, 1.41),
        "HEXA-MoE (model-centric)": (1.51, 1.60, 1.69, 1.82),
    },
    "small": {
        "Tutel": (3.01, 2.53, 3.28, 3.00),
        "MegaBlocks (MoE)": (3.23, 3.02, 3.07, 2.91),
        "MegaBlocks (dMoE)": (3.47, 2.87, 3.09, 2.91),
        "HEXA-MoE (data-centric)": (0.68, 0.85, 1.05, 1.07),
        "HEXA-MoE (model-centric)": (1.33, 1.48, 1.59, 1.68),
    },
}
"""Seconds a step over 2000 steps, top-1 to top-4; four RTX 4090, 4 experts, batch 110 to 80 (Base) and 140 to 110 (Small)."""

HETEROGENEITY = {
    (0, "data"): "share 0.40, 13.2 % below an even split",
    (0, "model"): "share 0.40, 6.3 %",
    (1, "data"): "share 0.50, even",
    (1, "model"): "share 0.50, even",
    (2, "data"): "share 0.74, 25.3 %",
    (2, "model"): "share 0.74, 11.9 %",
}

ABLATION = {
    "data": ("", ""),
    "data, no overlap": ("less or equal", "more"),
    "data, no shared cache": ("more, above Tutel", "slightly less"),
    "data, no fused kernel": ("equal", "more"),
    "data, no top-k memory optimisation": ("more", "slightly less"),
    "data, no expert-specific operators": ("more (Tutel's)", "more (Tutel's)"),
    "model": ("", ""),
    "model, no overlap": ("", ""),
    "model, no fused kernel": ("equal", "more"),
    "model, no top-k memory optimisation": ("more", "slightly less"),
    "model, no expert-specific operators": ("more (Tutel's)", "more (Tutel's)"),
    "padded capacity": ("more", "more"),
}
"""What the paper's figures say of memory and latency with a technique off (its text gives no numbers)."""
