"""Keep what autograd saves for backward in 8 bits an element: half the activation memory, forward untouched."""

import logging

from fp8hooks.audit import Audit, audit
from fp8hooks.config import CompressConfig, Rule
from fp8hooks.plan import Plan
from fp8hooks.session import Session, compress
from fp8hooks.wrapping import compress_wrapper, disable, enable, sessions

__all__ = [
    "Audit",
    "CompressConfig",
    "Plan",
    "Rule",
    "Session",
    "audit",
    "compress",
    "compress_wrapper",
    "disable",
    "enable",
    "sessions",
]
__version__ = "0.1.0"

# Quiet until the user asks for it.
logging.getLogger(__name__).addHandler(logging.NullHandler())
