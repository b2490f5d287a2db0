"""GateLab: a workbench for gated attention in language models."""

__version__ = "0.1.0"
