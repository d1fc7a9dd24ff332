"""PerformanceProfiles: which measured speeds are accepted, how they are stored, and the performance table."""
