"""The reconcile of an AcceleratorPool, and the discovery of pools from Nodes."""
