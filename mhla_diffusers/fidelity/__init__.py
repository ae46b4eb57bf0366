"""What a patch costs, told by an audit, and exactness spent where it costs most."""

from .audit import audit
from .audit_result import Audit, Fit, LayerAudit, TileAudit
from .dial import densify, set_density

__all__ = ["Audit", "Fit", "LayerAudit", "TileAudit", "audit", "densify", "set_density"]
