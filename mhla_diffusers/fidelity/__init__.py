"""What a patch costs, found by an audit, and a budget spent where it costs most."""

from .audit import audit
from .audit_result import Audit, LayerAudit
from .dial import densify, set_density

__all__ = ["Audit", "LayerAudit", "audit", "densify", "set_density"]
