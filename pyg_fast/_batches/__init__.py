"""Captured steps over padded batches of small graphs."""

from .inference import CapturedInference, capture_inference
from .step import CapturedBatchStep

__all__ = ['CapturedBatchStep', 'CapturedInference', 'capture_inference']
