"""Looks the rows of expert products up as `row = s * x[t] @ W[e]`, by projecting on random directions."""

from __future__ import annotations

from typing import NamedTuple

import torch


class RowMatch(NamedTuple):
    """token (R,), expert (R,) and scale (R,) of the rows of a product."""

    token: torch.Tensor
    expert: torch.Tensor
    scale: torch.Tensor


class RowMatcher:
    """Finds the token and expert that rows of a first projection were computed from: ``row = s * x[t] @ W[e]``.

    All tokens and experts are projected on a few random directions once. Looking a row up by its direction also gives the factor
    s, if any. Loops, sorts, one-hot einsums and gathered weights all look alike here.
    """

    _DIRECTIONS = 8
    _TOLERANCE = 1e-6

    def __init__(self, tokens: torch.Tensor, matrices: torch.Tensor) -> None:
        """tokens (T, K); matrices (E, N, K), the experts' weights."""
        generator = torch.Generator().manual_seed(7)
        probe = torch.randn(matrices.shape[1], self._DIRECTIONS, generator=generator, dtype=torch.float64, device="cpu")
        self._probe = probe.to(matrices.device)
        directions = torch.bmm(matrices.transpose(1, 2), self._probe.expand(len(matrices), -1, -1))
        table = torch.einsum("tk,ekd->etd", tokens, directions)
        self._experts, self._tokens = table.shape[:2]
        self._table = table.reshape(-1, self._DIRECTIONS)
        self._norms = self._table.norm(dim=1)

    def match(self, product: torch.Tensor, experts: torch.Tensor | None = None) -> RowMatch | None:
        """Looks up product (R, N); None when a row is not explained. Zero rows are token -1.

        ``experts`` (R,): whose row it is, where that is known.
        """
        wanted = product @ self._probe
        norms, known = wanted.norm(dim=1), self._norms.clamp(min=1e-300)
        largest = known.max() if experts is None else known.reshape(self._experts, -1).amax(1)[experts]
        zero = norms <= 1e-12 * largest
        flat = self._nearest(wanted / norms[:, None].clamp(min=1e-300), self._table / known[:, None], experts)
        scale = norms / known[flat]
        error = (wanted - scale[:, None] * self._table[flat]).norm(dim=1)
        if not bool(((error <= self._TOLERANCE * norms) | zero).all()):  # so that NaN is no match
            return None
        scale = torch.where((scale - 1).abs() < self._TOLERANCE, torch.ones_like(scale), scale)
        token = torch.where(zero, -1, flat % self._tokens)
        return RowMatch(token, flat // self._tokens, scale)

    def _nearest(self, wanted: torch.Tensor, table: torch.Tensor, experts: torch.Tensor | None) -> torch.Tensor:
        """Index of the most similar unit vector, among those of a row's expert; in blocks, so that similarities stay small."""
        if experts is None:
            blocks = wanted.split(max(1, _SIMILARITIES // max(1, len(table))))
            return torch.cat([(block @ table.T).argmax(1) for block in blocks] or [wanted.new_zeros(0).long()])
        step, table = (
            max(1, _SIMILARITIES // table[: self._tokens].numel()),
            table.reshape(self._experts, self._tokens, -1),
        )
        found = [
            torch.bmm(table[numbers], block[:, :, None])[:, :, 0].argmax(1) + numbers * self._tokens
            for block, numbers in zip(wanted.split(step), experts.split(step))
        ]
        return torch.cat(found or [experts])


_SIMILARITIES = 4_000_000
