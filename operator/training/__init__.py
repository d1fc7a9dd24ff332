"""TrainingJobs: their reconcile, their part of the snapshot, and what their pods report."""
