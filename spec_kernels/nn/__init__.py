"""Thin `torch.nn` modules over the operations: no logic that `ops` lacks."""

from spec_kernels.nn.verifier import Verifier

__all__ = ["Verifier"]
