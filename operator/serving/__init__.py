"""ModelServices: their reconcile, their part of the snapshot, demand, autoscaling and routes."""
