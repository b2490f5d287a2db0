"""Foreign models: loading, converting and measuring the checkpoints of the field."""

from gatelab.interop.convert import Conversion, convert
from gatelab.interop.loading import load

__all__ = ["Conversion", "convert", "load", "register"]


def register() -> None:
    """Make ``AutoConfig`` and ``AutoModelForCausalLM`` of transformers know GateLab's models; needs ``gatelab[hf]``."""
    try:
        from gatelab.interop import huggingface
    except ImportError:
        raise ValueError("registering GateLab's models needs the package transformers: install gatelab[hf]") from None
    huggingface.register()
