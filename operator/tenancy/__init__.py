"""Tenants: their reconcile, the namespaces that they claim, members' rights, NetworkPolicies, and counted use."""
