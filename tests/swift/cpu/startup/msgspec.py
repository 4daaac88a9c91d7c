"""What ms-swift 4.6 imports of msgspec, for GRPO and GKD, without naming it among what it needs."""

from dataclasses import field

__all__ = ["field"]
