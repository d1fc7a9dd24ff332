"""One handler per kind: gathers the view of an object, calls its pure reconcile, and passes the result to the writer.

This is the only room that knows both the caches and the reconciles. It makes no decisions of its own.

    training_jobs   model_services   tenants (and namespaces)   pools   foreign_pods (and Jobs)
          └───────────────┴─────────────────┴──────────────────────┴────────┘
                                 shared: parts of the operator that several of them use
"""

from __future__ import annotations

from busbar.operator.handlers.registered import Handlers

__all__ = ["Handlers"]
